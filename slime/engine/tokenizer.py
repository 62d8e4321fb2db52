"""Text in and out of the engine: encoding prompts, decoding outputs, stop strings, incremental text of streams.

Invariant: the pieces that a TextStream gives out join to exactly the text of the whole answer. A model folder without
tokenizer files is served by token ids only: text is then "" and text prompts are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime.engine.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
"""What a decoder gives for bytes that are not (yet) a character."""


class EngineTokenizer:
    """Encode and decode with the tokenizer of a model folder; `is_available` says whether there is one."""

    def __init__(self, model_path: str | Path):
        self._tokenizer = _load(Path(model_path))
        decoder = None if self._tokenizer is None else self._tokenizer.decoder
        self._byte_of = byte_alphabet() if "ByteLevel" in repr(decoder) else {}

    @property
    def is_available(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises: ValueError when the model folder has no tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("text prompts need a tokenizer and the model folder has none: send input_ids")
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._tokenizer is None or not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token of a byte-level vocabulary stands for; None for other vocabularies."""
        piece = self._tokenizer.id_to_token(token) if self._byte_of else None
        values = [self._byte_of.get(char) for char in piece or ""]
        return None if not values or None in values else bytes(values)

    def lossless(self, token: int, text: str) -> str:
        """Return `text`, or, where that is a broken character, the token's bytes as Latin-1."""
        raw = self.token_bytes(token) if REPLACEMENT in text else None
        if raw is None or _is_utf8(raw):
            return text
        return raw.decode("latin-1")

    def decode_batch(self, batch: list[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        if self._tokenizer is None:
            return [""] * len(batch)
        return self._tokenizer.decode_batch(batch, skip_special_tokens=skip_special_tokens)

    def stop_window(self, params: SamplingParams) -> int:
        """Return how many of the last tokens can hold a stop string (each token is at least one byte)."""
        return max(len(s.encode()) for s in params.stop) + 4

    def final_text(self, text: str, params: SamplingParams, finish_reason: dict) -> str:
        """Cut `text` at the stop string that ended it, unless the request keeps it."""
        matched = finish_reason.get("matched")
        if isinstance(matched, str) and not params.no_stop_trim:
            position = text.find(matched)
            return text if position < 0 else text[:position]
        return text


def visible_ids(ids: list[int], params: SamplingParams, finish_reason: dict) -> list[int]:
    """Return the output ids that become text: without the stop token that ended them, unless the request keeps it."""
    matched = finish_reason.get("matched")
    if isinstance(matched, int) and not params.no_stop_trim and ids and ids[-1] == matched:
        return ids[:-1]
    return ids


def find_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the stop string that occurs first in `text`, None when none does.

    >>> find_stop("a;b.", (".", ";"))
    ';'
    """
    found = [(text.find(s), s) for s in stops if s in text]
    return min(found)[1] if found else None


class TextStream:
    """Cut the growing text of one answer into pieces at safe places."""

    def __init__(self, tokenizer: EngineTokenizer, params: SamplingParams):
        self._tokenizer, self._params = tokenizer, params
        self._ids: list[int] = []
        self._start, self._read = 0, 0  # tokens before _start are settled; _start.._read are already in _sent
        self._pending, self._sent = "", 0

    def push(self, new_ids: list[int]) -> str:
        """Add tokens and return the text that can be shown now."""
        self._ids.extend(new_ids)
        skip = self._params.skip_special_tokens
        before = self._tokenizer.decode(self._ids[self._start : self._read], skip)
        after = self._tokenizer.decode(self._ids[self._start :], skip)
        if after.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        self._pending += after[len(before) :]
        held = 0 if self._params.no_stop_trim else _held_back(self._pending, self._params.stop)
        piece = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(piece) :]
        self._sent += len(piece)
        return piece

    def finish(self, whole_text: str) -> str:
        """Return the part of the final text not given out yet."""
        return whole_text[self._sent :]


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that could begin a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop), len(text)), 0, -1):
            if text.endswith(stop[:size]):
                longest = max(longest, size)
                break
    return longest


def _load(folder: Path):
    """Return an object with encode(text).ids, decode(ids) and decode_batch, or None without tokenizer files."""
    from tokenizers import Tokenizer

    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if (folder / "tokenizer_config.json").is_file() or (folder / "vocab.json").is_file():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    return None
