"""Carries weights from the trainer to the rollout engines. Names, shapes and dtypes on the wire are Hugging Face's."""
