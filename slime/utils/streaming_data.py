"""Prompts of a file read lazily, for `--streaming-data`.

Invariants: rows are held only while they are read; `position` counts the rows read in this pass, dropped long ones
included; `rewind(mark)` goes on at the place of a `mark()` without reading what came before. No length, no shuffling. Does not
know epochs.
"""

from __future__ import annotations

import hashlib
import logging

from slime.utils.data import RowFormat, no_usable_prompt, usable_sample
from slime.utils.rows import Mark, RowStream, parse_data_path
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

NUM_LOGGED_DROPS = 3


class StreamingPrompts:
    """`next()` gives the prompts of `path` in file order, then None; `first` is the first of them.

    Raises:
        ValueError: the file has no usable prompt.
    """

    def __init__(self, path: str, fmt: RowFormat, tokenizer=None, processor=None) -> None:
        self._path, self._tokenizer, self._processor = path, tokenizer, processor
        self.num_too_long = 0
        self._stream = RowStream(path)
        self._start = self._stream.mark()
        location, row = next(self._stream, (path, None))
        self._first_row = repr(row)
        self._format = fmt if row is None else fmt.detect_keys(row)
        self.rewind()
        self.first = self.next()
        if self.first is None:
            raise no_usable_prompt(path, self.position, self.num_too_long, fmt.max_prompt_len)
        self.rewind()

    @property
    def position(self) -> int:
        return self._stream.position

    def mark(self) -> Mark:
        """The place after the last prompt that was given."""
        return self._stream.mark()

    def digest(self) -> str:
        """Tells this part of a file from others: by its slice and its first row, since the rest was not read."""
        text = repr((parse_data_path(self._path)[1], self._first_row))
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def rewind(self, mark: Mark | None = None) -> None:
        """Go on at a mark, or at the first row."""
        self._stream.go_to(mark or self._start)

    def next(self) -> Sample | None:
        limit = self._format.max_prompt_len
        for location, row in self._stream:
            sample = usable_sample((location, row), self._format, self._tokenizer, self._processor)
            if sample is not None:
                return sample
            self.num_too_long += 1
            if self.num_too_long <= NUM_LOGGED_DROPS:
                logger.warning("%s: dropped: longer than %d tokens (--rollout-max-prompt-len)", location, limit)
        return None
