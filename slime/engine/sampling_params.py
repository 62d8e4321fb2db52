"""`sampling_params` of /generate: the keys SGLang knows, their defaults and ranges.

Invariant: a SamplingParams that exists is valid for the model's vocabulary; everything else raises ValueError, which the
HTTP layer answers with 400. null means the default (routers re-encode requests with nulls).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_NEW_TOKENS = 128
UNSUPPORTED = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "logit_bias")
IGNORED = ("spaces_between_special_tokens", "stream_interval")


@dataclass(frozen=True)
class SamplingParams:
    """How to generate one answer. top_k 0 means the whole vocabulary, temperature 0 means greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    returns_kept_ids: bool = False
    """`custom_params.return_top_p_token_ids`: report what top-p, top-k and min-p left, and log-probs among it."""

    @property
    def is_filtered(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def is_penalised(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Range:
    low: float
    high: float = float("inf")
    open_low: bool = False

    def check(self, name: str, value: float) -> None:
        too_low = value <= self.low if self.open_low else value < self.low
        if too_low or value > self.high or value != value:
            bracket = "(" if self.open_low else "["
            raise ValueError(f"sampling_params.{name} must be in {bracket}{self.low:g}, {self.high:g}], got {value}")


_FLOATS = {
    "temperature": _Range(0.0),
    "top_p": _Range(0.0, 1.0, open_low=True),
    "min_p": _Range(0.0, 1.0),
    "repetition_penalty": _Range(0.0, 2.0, open_low=True),
    "frequency_penalty": _Range(-2.0, 2.0),
    "presence_penalty": _Range(-2.0, 2.0),
}
_INTS = {
    "max_new_tokens": _Range(0),
    "min_new_tokens": _Range(0),
    "n": _Range(1, 1024),
    "sampling_seed": _Range(-(2.0**63), 2.0**64),
}
_BOOLS = ("ignore_eos", "no_stop_trim", "skip_special_tokens")
_KNOWN = {*_FLOATS, *_INTS, *_BOOLS, "top_k", "stop", "stop_token_ids", "custom_params", *UNSUPPORTED, *IGNORED}


def parse_sampling_params(raw: Any, vocab_size: int) -> SamplingParams:
    """Check `raw` (the JSON object, or None) and return it with defaults filled in.

    Raises: ValueError naming the key and the value.
    """
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, dict):
        raise ValueError(f"sampling_params must be an object, got {type(raw).__name__}")
    given = {name: value for name, value in raw.items() if value is not None}
    unknown = [name for name in raw if name not in _KNOWN]
    if unknown:
        raise ValueError(f"unknown sampling_params {sorted(unknown)}; known: {sorted(_KNOWN)}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in UNSUPPORTED:
            if value not in ("", [], {}):
                raise ValueError(f"sampling_params.{name} is not supported by the embedded engine")
        elif name == "custom_params":
            if not isinstance(value, dict):
                raise ValueError(f"sampling_params.custom_params must be an object or null, got {value!r}")
            values["returns_kept_ids"] = value.get("return_top_p_token_ids") is True
        elif name not in IGNORED:
            values[name] = _parse_value(name, value, vocab_size)
    if values.get("top_k") == 1:
        values["temperature"] = 0.0  # greedy, log-probs included, as in SGLang
    params = SamplingParams(**values)
    if params.min_new_tokens > params.max_new_tokens:
        raise ValueError(
            f"sampling_params.min_new_tokens {params.min_new_tokens} is above max_new_tokens {params.max_new_tokens}"
        )
    return params


def _parse_value(name: str, value: Any, vocab_size: int) -> Any:
    if name in _FLOATS:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"sampling_params.{name} must be a number, got {value!r}")
        _FLOATS[name].check(name, value)
        return float(value)
    if name in _INTS:
        number = _integer(name, value)
        _INTS[name].check(name, number)
        return number
    if name in _BOOLS:
        if not isinstance(value, bool):
            raise ValueError(f"sampling_params.{name} must be true or false, got {value!r}")
        return value
    if name == "top_k":
        number = _integer(name, value)
        if number < 1 and number != -1:
            raise ValueError(f"sampling_params.top_k must be -1 (all) or at least 1, got {number}")
        return 0 if number == -1 or number >= vocab_size else number
    if name == "stop":
        return _stop_strings(value)
    return _stop_token_ids(value, vocab_size)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"sampling_params.{name} must be an integer, got {value!r}")
    return value


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"sampling_params.stop must be a string or a list of strings, got {value!r}")
    return tuple(s for s in strings if s)


def _stop_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"sampling_params.stop_token_ids must be a list of integers, got {value!r}")
    ids = [_integer("stop_token_ids", item) for item in value]
    return tuple(i for i in ids if 0 <= i < vocab_size)
