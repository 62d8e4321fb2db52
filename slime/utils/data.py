"""The way from a row of a prompt file to a `Sample`, and whole sets of them.

Invariants: rows keep the file's order; a row that cannot be used stops the run with `file:line` (nothing is skipped
silently); dropped long prompts are counted. Files are read by `slime.utils.rows`. Does not know epochs, shuffling or groups:
see `slime.rollout.data_source`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from slime.utils.media_values import as_data
from slime.utils.process_map import map_in_processes
from slime.utils.processing_utils import encode_prompt, encode_with_media, extract_media, place_media, render_chat
from slime.utils.rows import Row, read_rows
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# ---- row -> Sample -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowFormat:
    """How a row becomes a Sample: keys, template, limit. Field names are those of the flags."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_len: int | None = None
    strict: bool = False  # no auto-detection of keys

    @classmethod
    def from_args(cls, args) -> RowFormat:
        return cls(
            input_key=args.input_key,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            tool_key=args.tool_key,
            multimodal_keys=args.multimodal_keys,
            apply_chat_template=args.apply_chat_template,
            apply_chat_template_kwargs=args.apply_chat_template_kwargs or {},
            max_prompt_len=args.rollout_max_prompt_len,
            strict=args.strict_args,
        )

    def detect_keys(self, row: dict[str, Any]) -> RowFormat:
        """Fill in the usual key names when the default ones are absent from the first row; says so."""
        found = self
        if self.strict:
            return found
        if self.input_key == "input" and "input" not in row:
            key = next((k for k in ("prompt", "messages") if k in row), None)
            if key is not None:
                logger.info("--input-key not given and rows have no 'input': using %r", key)
                found = replace(found, input_key=key)
        if self.label_key is None and "label" in row:
            logger.info("--label-key not given: using 'label'")
            found = replace(found, label_key="label")
        return found


def row_to_sample(row: dict[str, Any], location: str, fmt: RowFormat, tokenizer=None, processor=None) -> Sample:
    """One row as a pending Sample (no group, no index).

    Raises:
        ValueError: a key is absent or a value has the wrong kind; names the flag, the key and `file:line`.
    """
    prompt = _messages_or_text(_value(row, fmt.input_key, "--input-key", location), location)
    if isinstance(prompt, str) and (fmt.apply_chat_template or fmt.multimodal_keys):
        prompt = [{"role": "user", "content": prompt}]
    metadata = dict(_metadata(row, fmt, location))
    tools = _tools(row, fmt, location)
    if tools is not None:
        metadata["tools"] = tools
    media = None
    if fmt.multimodal_keys:
        prompt, media = _with_media(prompt, row, fmt, location)
    label = None if fmt.label_key is None else _value(row, fmt.label_key, "--label-key", location)
    if fmt.apply_chat_template:
        prompt = _render(processor or tokenizer, prompt, tools, fmt, location)
    return Sample(
        prompt=prompt,
        label=label,
        metadata=metadata,
        multimodal_inputs=media,
        apply_chat_template_kwargs=dict(fmt.apply_chat_template_kwargs),
    )


def _value(row: dict, key: str, flag: str, location: str) -> Any:
    if key not in row:
        raise ValueError(f"{location}: no key {key!r} ({flag}); the row has {sorted(row)}")
    return row[key]


def _messages_or_text(prompt: Any, location: str) -> str | list[dict]:
    if isinstance(prompt, str):
        return prompt
    is_messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not is_messages:
        raise ValueError(
            f"{location}: a prompt must be text or a non-empty list of messages with a role, found {prompt!r:.200}"
        )
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in prompt
    ]


def _metadata(row: dict, fmt: RowFormat, location: str) -> dict:
    metadata = row.get(fmt.metadata_key)
    if isinstance(metadata, str):
        metadata = _parsed(metadata, f"{location}: {fmt.metadata_key!r} (--metadata-key)")
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(
            f"{location}: {fmt.metadata_key!r} (--metadata-key) must be an object, found {metadata!r:.200}"
        )
    return metadata or {}


def _parsed(text: str, what: str) -> Any:
    """The value of JSON text; None for an empty one."""
    try:
        return json.loads(text) if text.strip() else None
    except ValueError as error:
        raise ValueError(f"{what}: no JSON: {error}: {text!r:.200}") from error


def _tools(row: dict, fmt: RowFormat, location: str) -> list | None:
    tools = row.get(fmt.tool_key)
    if isinstance(tools, str):
        tools = _parsed(tools, f"{location}: {fmt.tool_key!r} (--tool-key)")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{location}: {fmt.tool_key!r} (--tool-key) must be a list, found {tools!r:.200}")
    return tools


def _with_media(messages: list[dict], row: dict, fmt: RowFormat, location: str) -> tuple[list[dict], dict | None]:
    """The messages with the row's media in their places, and the media."""
    try:
        media = {kind: as_data(row.get(key)) for kind, key in fmt.multimodal_keys.items()}
        placed = place_media(as_data(messages), media)
        return placed, extract_media(placed)
    except (AssertionError, ValueError, KeyError, OSError) as error:
        raise ValueError(f"{location}: --multimodal-keys: {error}") from error


def _render(tokenizer, messages: list[dict], tools: list | None, fmt: RowFormat, location: str) -> str:
    try:
        return render_chat(tokenizer, messages, tools, fmt.apply_chat_template_kwargs)
    except Exception as error:
        raise ValueError(f"{location}: the chat template failed: {error}") from error


# ---- whole sets ----------------------------------------------------------------------------------------------------


def iter_samples(
    path: str, fmt: RowFormat, tokenizer=None, processor=None, num_workers: int = 0, digest: Any = None
) -> Iterator:
    """Samples of the rows of `path` in order, None for one whose prompt is too long; keys are detected on the first row.

    Args:
        num_workers: processes that parse, render and count; 0 for none. digest: of `hashlib`, is told the rows.
    """
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        return iter(())
    shared = (fmt.detect_keys(first[1]), tokenizer, processor)
    rows = itertools.chain([first], rows)
    if digest is not None:
        rows = _told_to(digest, rows, shared[0])
    if num_workers > 0:
        return map_in_processes(usable_sample, rows, shared, num_workers, "--num-data-workers")
    return (usable_sample(row, *shared) for row in rows)


def _told_to(digest: Any, rows: Iterator[Row], fmt: RowFormat) -> Iterator[Row]:
    for located_row in rows:
        given = [located_row[1].get(key) for key in (fmt.input_key, fmt.tool_key, fmt.label_key)]
        digest.update(f"{given!r}\0".encode("utf-8", "surrogatepass"))
        yield located_row


def usable_sample(located_row: Row, fmt: RowFormat, tokenizer=None, processor=None) -> Sample | None:
    """The sample of a (location, row), or None when its prompt is longer than the format's limit."""
    location, row = located_row
    sample = row_to_sample(row, location, fmt, tokenizer, processor)
    limit = fmt.max_prompt_len
    return sample if limit is None or prompt_token_count(sample, tokenizer, processor) <= limit else None


def no_usable_prompt(path: str, num_rows: int, num_too_long: int, limit: int | None) -> ValueError:
    """The error of a file without a prompt that can be handed out."""
    too_long = (
        "" if limit is None else f", {num_too_long} of them longer than {limit} tokens (--rollout-max-prompt-len)"
    )
    return ValueError(
        f"{path} holds no usable prompt: {num_rows} rows after the slice{too_long}; check the file, the slice and the limit"
    )


class PromptSet:
    """All prompts of one file, too long ones dropped: `origin_samples` in the file's order, `samples` in that of the last `shuffle`.

    Who sets `samples` chooses what is handed out, and shuffled in later epochs. `num_too_long` counts the dropped ones; `sample(n)`
    returns the next n (wrapping around).
    """

    seed = 42

    def __init__(self, path: str, fmt: RowFormat, tokenizer=None, processor=None, num_workers: int = 0) -> None:
        digest = hashlib.blake2b(digest_size=16)
        samples = list(iter_samples(path, fmt, tokenizer, processor, num_workers, digest))
        self._digest = digest.hexdigest()
        num_rows = len(samples)
        self.origin_samples = self.samples = [sample for sample in samples if sample is not None]
        self._chosen = self._in_order = self.samples  # what is shuffled, and that in the present order
        self._shuffled_by: int | None = None
        self.num_too_long = num_rows - len(self.samples)
        self._position = 0
        if self.num_too_long:
            logger.warning(
                "%s: dropped %d of %d prompts longer than %d tokens",
                path,
                self.num_too_long,
                num_rows,
                fmt.max_prompt_len,
            )
        if not self.samples:
            raise no_usable_prompt(path, num_rows, self.num_too_long, fmt.max_prompt_len)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def digest(self) -> str:
        """Tells this set of prompts from others, labels included, by what stands in the file: a chat template may add today's date."""
        return self._digest

    def shuffle(self, new_epoch_id: int, seed: int | None = None) -> None:
        """Put `samples` into the order of the epoch; the same epoch has the same order."""
        wanted = (self.seed if seed is None else seed) + new_epoch_id
        if wanted != self._shuffled_by:
            self.unshuffle()
            random.Random(wanted).shuffle(self.samples)
            self._shuffled_by = wanted

    def unshuffle(self) -> None:
        """Put `samples` into the order of the file, or that in which a user has set them."""
        if self.samples is not self._in_order:
            self._chosen = self.samples
        self.samples = self._in_order = list(self._chosen)
        self._shuffled_by = None

    def sample(self, num_samples: int) -> list[Sample]:
        """The next `num_samples` prompts in file order."""
        picked = [self.samples[(self._position + i) % len(self)] for i in range(num_samples)]
        self._position = (self._position + num_samples) % len(self)
        return picked


class Dataset(PromptSet):
    """The prompts of a file with an order of their own, for data sources that users write; the arguments are `RowFormat`'s."""

    def __init__(
        self,
        path: str,
        tokenizer,
        processor=None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        label_key: str | None = None,
        seed: int = 42,
        **row_format: Any,
    ) -> None:
        fmt = RowFormat(input_key=prompt_key, label_key=label_key, max_prompt_len=max_length, strict=True, **row_format)
        super().__init__(path, fmt, tokenizer, processor)
        self.seed = seed


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a prompt file, of the slice that the path may name."""
    return (row for _, row in read_rows(path))


def prompt_token_count(sample: Sample, tokenizer, processor=None) -> int:
    """Tokens of the prompt as the engine will see it (message lists rendered, media expanded)."""
    text = sample.prompt
    if not isinstance(text, str):
        text = render_chat(tokenizer, text, sample.metadata.get("tools"), sample.apply_chat_template_kwargs)
    if sample.multimodal_inputs and processor is not None:
        return len(encode_with_media(processor, text, sample.multimodal_inputs)[0])
    return len(encode_prompt(tokenizer, text))
