"""The check of every sample before training.

Invariants: reads, never changes; a few passes over the tokens (microseconds per thousand). An error names the sample, the first
token that is wrong, and the span around it with its provenance: turn, role, weight version, source.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from numbers import Integral, Real
from typing import Any

import numpy as np

from slime.utils.provenance import describe, spans_of

MAX_LOG_PROB = 1e-3
"""A log-probability may exceed 0 by rounding, not by more."""


def whole(value: Any) -> int:
    """A token id of any number type; arrays that grew from empty ones hold 5.0 for 5."""
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, Real) and float(value).is_integer():
            return int(value)
        raise


PLAIN_TYPES = {whole: {int}, float: {int, float}}
"""Of values that need no look at each: what turns them into numbers -> their types."""


def check_samples(samples: Sequence[Any], vocab_size: int | None = None, uses_log_probs: bool = False) -> None:
    """Check that samples can be trained on.

    The values of all samples are looked at in one go, and one by one only where something may be wrong.

    Args:
        vocab_size: ids must lie below it, when known.
        uses_log_probs: training uses the engine's log-probs, so that every trained token must have been sampled.

    Raises:
        ValueError: the first thing that is wrong, with the sample, the token and where it came from.
    """
    for sample in samples:
        check_alignment(sample)
        _check_prompt(sample)
    if uses_log_probs or not _values_are_plain(samples, vocab_size):
        for sample in samples:
            _check_values(sample, vocab_size, uses_log_probs)


def _values_are_plain(samples: Sequence[Any], vocab_size: int | None) -> bool:
    """Whether every token id is in the vocabulary and every given log-prob is one, those of masked tokens too."""
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    try:
        if any(set(map(type, sample.tokens)) - {int} for sample in samples):
            return False
        tokens = _joined([sample.tokens for sample in samples], np.int64)
        if not np.all((tokens >= 0) & (tokens < limit)):
            return False
        for name in ("rollout_log_probs", "teacher_log_probs"):
            given = [values for sample in samples if (values := getattr(sample, name)) is not None]
            numbers = _joined(given, np.float64)
            if not np.all(np.isfinite(numbers) & (numbers <= MAX_LOG_PROB)):
                return False
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _joined(rows: list[Sequence], dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype)


def _check_values(sample: Any, vocab_size: int | None, uses_log_probs: bool) -> None:
    """Arguments and errors as of `check_samples`."""
    length = sample.response_length
    prompt_length = len(sample.tokens) - length
    tokens = _numbers(sample, sample.tokens, whole, prompt_length, "token id that is no whole number")
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    _fail_at(sample, (tokens < 0) | (tokens >= limit), prompt_length, tokens, f"token id outside [0, {vocab_size})")
    mask = np.ones(length, bool) if sample.loss_mask is None else np.asarray(sample.loss_mask, dtype=bool)
    if sample.remove_sample or not mask.any():
        return
    for name in ("rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, name)
        if values is not None:
            numbers = _numbers(sample, values, float, 0, f"{name} that is no number")
            bad = mask & ~(np.isfinite(numbers) & (numbers <= MAX_LOG_PROB))
            _fail_at(sample, bad, 0, numbers, f"trained token whose {name} is no log-probability")
    if uses_log_probs and sample.rollout_log_probs is not None:
        sampled = np.ones(length, bool)
        for span in spans_of(sample):
            sampled[span["start"] : span["end"]] = span["role"] == "assistant"
        _fail_at(
            sample,
            mask & ~sampled,
            0,
            mask,
            "token that the model did not sample is trained with the engine's log-probs",
        )


def _check_prompt(sample: Any) -> None:
    """Nothing predicts the first of all tokens; tokens without their prompt would train on the log-probs of other samples."""
    length = sample.response_length
    first_is_trained = length > 0 and (sample.loss_mask is None or sample.loss_mask[0])
    if length == len(sample.tokens) and first_is_trained and not sample.remove_sample:
        raise ValueError(
            f"sample {sample.index} (group {sample.group_index}): tokens has only the {length} tokens of the response; it must begin "
            f"with the prompt's\n  in {describe(sample, 0)}"
        )


def _numbers(sample: Any, values: Sequence, convert: Callable, offset: int, what: str) -> np.ndarray:
    """The values as whole numbers or floats; ValueError at the first that `convert` refuses."""
    dtype = np.int64 if convert is whole else np.float64
    if set(map(type, values)) <= PLAIN_TYPES[convert]:
        try:
            return np.fromiter(values, dtype, len(values))
        except OverflowError:
            return np.asarray(values, dtype=object)
    numbers = []
    for place, value in enumerate(values):
        try:
            numbers.append(convert(value))
        except (TypeError, ValueError):
            _fail_at(sample, np.arange(len(values)) == place, offset, [repr(value) for value in values], what)
    return np.asarray(numbers, dtype=object if dtype is np.int64 else dtype)


def check_alignment(sample: Any) -> None:
    """Check that the sample's lists have the lengths that they should.

    Raises: ValueError with the first place that is wrong, and where the tokens there came from.
    """
    try:
        sample.check_invariants()
    except ValueError as error:
        if not isinstance(sample.response_length, Integral):
            raise
        raise ValueError(f"{error}\n  in {describe(sample, _first_uncovered(sample))}") from None


def _fail_at(sample: Any, bad: np.ndarray, offset: int, values: Sequence, what: str) -> None:
    """Raise for the first place of `bad`; `offset` is the position of the first response token in it."""
    if not bad.any():
        return
    place = int(bad.argmax())
    where = f"response token {place - offset}" if place >= offset else f"prompt token {place}"
    span = describe(sample, place - offset) if place >= offset else "the prompt"
    raise ValueError(
        f"sample {sample.index} (group {sample.group_index}): {what}: {where} has {values[place]}\n  in {span}\n"
        "  --no-check-samples trains on it all the same"
    )


def _first_uncovered(sample: Any) -> int:
    """The response token at which a per-token list ends too early or goes on too long."""
    lists = (sample.loss_mask, sample.rollout_log_probs, sample.teacher_log_probs, sample.token_weight_versions or None)
    lengths = [len(values) for values in lists if values is not None and len(values) != sample.response_length]
    bad_mask = [i for i, m in enumerate(sample.loss_mask or []) if m not in (0, 1)]
    first = min([*lengths, *bad_mask, max(0, sample.response_length - 1)])
    return max(0, first)
