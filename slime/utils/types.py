"""`Sample`: one trajectory and everything training needs to know about it.

Invariants (`Sample.check_invariants`): `tokens` = prompt ids + response ids; every response-side list has
`response_length` entries (`rollout_top_p_token_offsets` one more); `rollout_routed_experts` has one row per token but
the last. "Response" is everything after the first prompt, tool output included. `Sample.append_response_tokens` is
the one supported way to grow a response; it keeps all of them aligned.

Importing this module needs the standard library only. It knows no engine, no tokenizer and no data source.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import Any

from slime.utils import meta_info as _meta
from slime.utils.plain_data import MEDIA_FIELDS, with_shared_leaves
from slime.utils.provenance import record_span


class _Counters:
    """Numbers as plain data and back; those that are absent are 0."""

    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict[str, int]):
        return cls(**{name: data.get(name, 0) for name in cls.__dataclass_fields__})


@dataclass
class SpecInfo(_Counters):
    """Speculative-decoding counters, summed over the engine calls of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: dict) -> None:
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num") or 0)
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num") or 0)
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct") or 0)
        self.completion_token_num += int(meta_info.get("completion_tokens") or 0)

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo(_Counters):
    """Prefix-cache counters, summed over the engine calls of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: dict) -> None:
        self.cached_tokens += int(meta_info.get("cached_tokens") or 0)
        self.total_prompt_tokens += int(meta_info.get("prompt_tokens") or 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


class Status(Enum):
    """Where a sample stands. ABORTED and FAILED samples may be submitted again."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class _StatusByWord:
    """Lets a status be set by its word, as code that fills samples from other programs' answers does.

    Only setting it comes here: `__get__` is left out, so that reading finds the instance's own entry.
    """

    def __set__(self, sample: Sample, value: Any) -> None:
        if type(value) is str:
            try:
                value = Status(value)
            except ValueError:
                known = ", ".join(status.value for status in Status)
                raise ValueError(f"{value!r} is no status of a sample; expected one of {known}") from None
        vars(sample)["status"] = value


_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None), Status})


def _copied(value: Any) -> Any:
    if type(value) in (list, dict) and not value:
        return type(value)()
    if type(value) is list and set(map(type, value)) <= _IMMUTABLE:  # token lists are long
        return list(value)
    if isinstance(value, (SpecInfo, PrefixCacheInfo)):
        return type(value)(**vars(value))
    return copy.deepcopy(value)


@dataclass
class Sample:
    """One trajectory of one prompt. `rollout_id` here names the execution it came from, not the generation round."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    # One weight version per response token (None: unknown, or not sampled by the engine). Empty: not recorded.
    token_weight_versions: list[str | None] = field(default_factory=list)
    # Where the response tokens come from, see `slime.utils.provenance`.
    token_spans: list[dict[str, Any]] = field(default_factory=list)

    # ---- serialisation -------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Shallow copy of all attributes (extra ones too) with plain values for the status and the info blocks."""
        data = dict(vars(self))
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`; unknown keys become plain attributes. Does not change `data`."""
        data = dict(data)
        data["status"] = Status(data["status"])
        data["spec_info"] = SpecInfo.from_dict(data.get("spec_info") or {})
        data["prefix_cache_info"] = PrefixCacheInfo.from_dict(data.get("prefix_cache_info") or {})
        known = {name: data.pop(name) for name in cls.__dataclass_fields__ if name in data}
        sample = cls(**known)
        for name, value in data.items():
            setattr(sample, name, value)
        return sample

    def duplicate(self) -> Sample:
        """A copy that shares nothing mutable with this one but the images, arrays and tensors of its media.

        Those are large and the same for all samples of a prompt: code that changes one replaces it by a changed copy.
        """
        return self.duplicates(1)[0]

    def duplicates(self, count: int) -> list[Sample]:
        """`count` such copies."""
        mutable = [(name, value) for name, value in vars(self).items() if type(value) not in _IMMUTABLE]
        twins = [object.__new__(type(self)) for _ in range(count)]
        for twin in twins:
            twin.__dict__.update(vars(self))
            for name, value in mutable:
                twin.__dict__[name] = with_shared_leaves(value) if name in MEDIA_FIELDS else _copied(value)
        return twins

    # ---- helpers -------------------------------------------------------------------------------------------------

    def get_reward_value(self, args) -> Any:
        """The reward, or its `args.reward_key` entry when that flag is set."""
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def has_verdict(self) -> bool:
        """Whether the reward says something: neither its computation nor the generation failed."""
        metadata = self.metadata or {}
        return not metadata.get("reward_error") and not metadata.get("generate_error")

    @property
    def is_truncated(self) -> bool:
        """Whether the response hit a length limit, also where its reward failed afterwards."""
        return self.status == Status.TRUNCATED or bool((self.metadata or {}).get("was_truncated"))

    @property
    def effective_response_length(self) -> int:
        """Number of trained response tokens."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    def reset_response(self) -> None:
        """Forget everything generated so far, so that the sample starts again from its prompt."""
        if self.response_length and self.tokens:
            self.tokens = self.tokens[: self.prompt_length]
        self.response, self.response_length, self.reward = "", 0, None
        self.loss_mask = self.rollout_log_probs = self.teacher_log_probs = None
        self.rollout_top_p_token_ids = self.rollout_top_p_token_offsets = self.rollout_routed_experts = None
        self.weight_versions, self.token_weight_versions, self.token_spans = [], [], []
        self.remove_sample, self.non_generation_time = False, 0.0
        self.spec_info, self.prefix_cache_info = SpecInfo(), PrefixCacheInfo()
        for name in ("start_rollout_id", "reward_error", "generate_error", "was_truncated", "tokens_from_text"):
            self.metadata.pop(name, None)
        self.status = Status.PENDING

    def make_plain(self) -> None:
        """Users' functions may set per-token fields to arrays, tensors or tuples: make them the lists that they should be."""
        for name in ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs"):
            values = getattr(self, name)
            if values is not None and type(values) is not list:
                setattr(self, name, _meta.flat_list(values))

    # ---- growing a response --------------------------------------------------------------------------------------

    def append_response_tokens(
        self,
        args=None,
        *,
        tokens=None,
        log_probs=None,
        trainable: bool = True,
        meta_info: dict | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
        role: str | None = None,
        source: str | None = None,
    ) -> None:
        """Append tokens to the response and keep masks, log-probs, versions, replay data and status aligned.

        Args:
            args: needed only for `routed_experts` (num_layers, moe_router_topk) and speculative counters.
            tokens, log_probs: equally long lists or tensors; trainable tokens need log-probs, others must have none.
            meta_info: `meta_info` of the engine reply that produced the tokens.
            update_terminal_info: False for the non-final chunks of a stream.
            role, source: whose tokens these are, for error messages; "assistant" from the "engine" when trainable, else
                "context" from the "caller".

        Raises:
            ValueError: lengths or replay data do not fit together.
        """
        new_tokens = [int(t) for t in _meta.flat_list(tokens)]
        new_log_probs = None if log_probs is None else [float(x) for x in _meta.flat_list(log_probs)]
        _meta.check_log_probs(new_tokens, new_log_probs, trainable, where=f"sample {self.index}")
        if text:
            self.response += text
        if new_tokens:
            start = self.response_length
            self._extend(new_tokens, new_log_probs, trainable, meta_info or {})
            by_default = ("assistant", "engine" if meta_info else "caller") if trainable else ("context", "caller")
            versions = self.token_weight_versions[start:]
            spans, role, source = self.token_spans, role or by_default[0], source or by_default[1]
            self.token_spans = record_span(spans, start, versions, role, source)
        _meta.append_top_p(self, len(new_tokens), trainable, meta_info or {})
        _meta.append_routed_experts(self, args, meta_info or {})
        if meta_info and update_terminal_info and meta_info.get("finish_reason"):
            self._finish_call(args, meta_info)
        if update_terminal_info:  # the pieces of a stream are checked with the last one
            self.check_invariants()

    def _extend(self, tokens: list[int], log_probs: list[float] | None, trainable: bool, meta_info: dict) -> None:
        before = self.response_length
        self._align_versions()
        if self.rollout_log_probs is None and before and trainable:
            raise ValueError(
                f"sample {self.index}: response tokens [0:{before}) have no rollout_log_probs, so log-probs of the "
                f"tokens [{before}:{before + len(tokens)}) cannot be aligned; give log-probs from the first token on"
            )
        if self.loss_mask is None:
            self.loss_mask = [1] * before
        earlier = self.rollout_log_probs if self.rollout_log_probs is not None else [0.0] * before
        versions = self.token_weight_versions or [None] * before
        fresh = _meta.token_versions(meta_info, len(tokens)) if trainable else [None] * len(tokens)
        self.tokens = list(self.tokens) + tokens
        self.response_length = before + len(tokens)
        self.loss_mask = list(self.loss_mask) + [int(trainable)] * len(tokens)
        self.rollout_log_probs = list(earlier) + (log_probs if trainable else [0.0] * len(tokens))
        self.token_weight_versions = versions + fresh

    def _finish_call(self, args, meta_info: dict) -> None:
        if args is not None and args.sglang_speculative_algorithm:
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        reason = meta_info["finish_reason"]
        kind = reason.get("type") if isinstance(reason, dict) else reason
        finished = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
        self.status = finished.get(kind, self.status)

    def _align_versions(self) -> None:
        """Users' functions may add and cut tokens themselves; those they added have no known version."""
        if self.token_weight_versions and len(self.token_weight_versions) != self.response_length:
            unknown = [None] * (self.response_length - len(self.token_weight_versions))
            self.token_weight_versions = (list(self.token_weight_versions) + unknown)[: self.response_length]

    # ---- checking ------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise ValueError naming the field and the token span that does not fit."""
        total, length = len(self.tokens), self.response_length
        if not isinstance(length, Integral):
            raise ValueError(f"sample {self.index}: response_length {length!r} is no whole number")
        if not 0 <= length <= total:
            raise ValueError(
                f"sample {self.index}: response_length {length} with {total} tokens: no room for the response"
            )
        self._align_versions()
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            values = getattr(self, name)
            if values is not None:
                _meta.check_span(self.index, name, len(values), length)
        bad = (
            [] if set(self.loss_mask or ()) <= {0, 1} else [i for i, m in enumerate(self.loss_mask) if m not in (0, 1)]
        )
        if bad:
            raise ValueError(f"sample {self.index}: loss_mask[{bad[0]}] is {self.loss_mask[bad[0]]!r}, expected 0 or 1")
        _meta.check_top_p(self)
        _meta.check_routed_experts(self)


Sample.status = _StatusByWord()  # not in the class, where it would be the field's default

#: The columns of a round as the trainer holds them: per-sample lists by name.
RolloutBatch = dict[str, Any]

# The public spelling of the nested names; set here so that pickling finds them under the module.
Sample.Status = Status
Sample.SpecInfo = SpecInfo
Sample.PrefixCacheInfo = PrefixCacheInfo
