"""Prompts of a file read lazily, for `--streaming-data`.

Invariants: only one row is held at a time; `position` counts the rows read in this pass, dropped long ones included, so
that `rewind(position)` continues at the same row. No length, no shuffling. Does not know epochs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from slime.utils.data import RowFormat, iter_samples, prompt_token_count
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class StreamingPrompts:
    """`next()` gives the prompts of `path` in file order, then None; `first` is the first of them.

    Raises:
        ValueError: the file has no usable prompt.
    """

    def __init__(self, path: str, fmt: RowFormat, tokenizer=None, processor=None) -> None:
        self._path, self._format, self._tokenizer, self._processor = path, fmt, tokenizer, processor
        self.position = 0
        self.num_too_long = 0
        self.rewind()
        self.first = self.next()
        if self.first is None:
            raise ValueError(
                f"{path} holds no usable prompt: {self.position} rows after the slice, {self.num_too_long} of them longer "
                f"than {fmt.max_prompt_len} tokens (--rollout-max-prompt-len); check the file, the slice and the limit"
            )
        self.rewind()

    def rewind(self, position: int = 0) -> None:
        """Continue at row `position`."""
        rows = iter_samples(self._path, self._format, self._tokenizer, self._processor)
        self._rows: Iterator[Sample] = itertools.islice(rows, position, None)
        self.position = position

    def next(self) -> Sample | None:
        limit = self._format.max_prompt_len
        for sample in self._rows:
            self.position += 1
            if limit is None or prompt_token_count(sample, self._tokenizer, self._processor) <= limit:
                return sample
            self.num_too_long += 1
            logger.warning("%s: dropped row %d: longer than %d tokens", self._path, self.position, limit)
        return None
