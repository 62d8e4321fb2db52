"""A reward model: a Hugging Face sequence classifier with one output, asked for the score of a text.

Used in the rollout process and by the reward engine, so that both give the same number. Sequences are read one by one: padding
would have to be told from end tokens, which models confuse. Knows no samples and no HTTP.
"""

from __future__ import annotations

import threading

from slime.utils.processing_utils import load_tokenizer


class RewardModel:
    """Scores token ids; calls from several threads take turns.

    Raises: ValueError when the folder holds no sequence classifier with one output.
    """

    def __init__(self, path: str, dtype: str = "auto"):
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        from slime.utils import device

        config = AutoConfig.from_pretrained(path)
        names = config.architectures or []
        if config.num_labels != 1 or not any(name.endswith("ForSequenceClassification") for name in names):
            raise ValueError(
                f"{path} is no reward model: expected a ...ForSequenceClassification with one label, found {names} with "
                f"{config.num_labels}"
            )
        config.pad_token_id = None  # the last token is the last one, whatever it is
        given = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(dtype, dtype)
        self._model = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype=given)
        self._model.to(device.device()).eval()
        self.tokenizer = load_tokenizer(path)
        self.path, self.max_tokens = path, getattr(config, "max_position_embeddings", None)
        self._turn = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens only where the text has them."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def score(self, input_ids: list[int]) -> float:
        """Return the model's number for one sequence.

        Raises: ValueError for an empty or too long sequence, or ids that the model does not have.
        """
        import torch

        size = self._model.config.get_text_config().vocab_size
        if not input_ids or not all(0 <= token < size for token in input_ids):
            raise ValueError(f"a sequence to score needs at least one token, all ids below {size}")
        if self.max_tokens and len(input_ids) > self.max_tokens:
            raise ValueError(f"{len(input_ids)} tokens are more than the reward model's {self.max_tokens}")
        with self._turn, torch.inference_mode():
            output = self._model(input_ids=torch.tensor([input_ids], device=self._model.device))
        return float(output.logits[0, 0])
