"""Carries weights from the trainer to the rollout engines: one publisher, several transports. Wire names are Hugging Face's."""
