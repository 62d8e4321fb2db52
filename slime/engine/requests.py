"""One answer being generated: what was asked, what has come out, why it ended.

The scheduler thread writes, the HTTP thread reads after the request finished (or the pieces handed to it in a chunk).
Does not know batches or tensors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from slime.engine.sampling_params import SamplingParams

NO_INPUT_LOGPROBS = -1


@dataclass
class Chunk:
    """New output of a streaming request since the last chunk."""

    token_ids: list[int]
    logprobs: list[float]
    num_output: int
    weight_version: str


@dataclass
class Request:
    """State of one answer. `sink` belongs to whoever submitted the request; the engine never looks at it."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    parent_rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = NO_INPUT_LOGPROBS
    top_logprobs_num: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    stream: bool = False
    return_routed_experts: bool = False
    lora_name: str | None = None
    adapter: Any = None
    """The lora.Adapter that it runs with; looked up by name whenever it starts."""
    sink: Any = None
    received_at: float = field(default_factory=time.time)
    started_at: float | None = None
    finished_at: float | None = None

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    output_kept: list[Any] = field(default_factory=list)
    """Ids that the filters kept at each output token, int32 arrays; empty where nothing was filtered. If asked for."""
    input_logprobs: list[float | None] = field(default_factory=list)
    output_chosen: list[list[tuple[float, int]]] = field(default_factory=list)
    input_top: list[list[tuple[float, int]] | None] = field(default_factory=list)
    input_chosen: list[list[tuple[float, int]] | None] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    weight_version: str = ""
    num_retractions: int = 0
    cached_tokens: int = 0
    prefix: Any = None
    """What of the tokens to read was kept from an earlier request (a prefix_store.Match)."""
    weights_version: int = 0
    """Count of weight changes when the request's tokens were read."""
    routed_experts: Any = None
    """Experts that read each token but the last, an int32 array [tokens - 1, layers, experts a token]."""
    finish_reason: dict[str, Any] | None = None
    text: str = ""
    error: str | None = None
    is_client_error: bool = False

    @property
    def needs_input_logprobs(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    @property
    def adapter_number(self) -> int:
        """Tokens are the same context only under the same adapter; 0 is none."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def num_output(self) -> int:
        return len(self.output_ids)

    @property
    def cached_details(self) -> dict[str, int] | None:
        """Where the cached tokens were, in SGLang's words."""
        return {"device": self.cached_tokens, "host": 0} if self.cached_tokens else None

    @property
    def wants_table(self) -> bool:
        """Whether log-probs of other tokens than the sampled one are asked for."""
        return self.return_logprob and bool(self.top_logprobs_num or self.logprob_token_ids)

    @property
    def reusable_length(self) -> int:
        """Tokens that need not be read if their keys and values are known: all but the last, and none to be scored."""
        length = len(self.prompt_ids) + len(self.output_ids) - 1
        scores = self.needs_input_logprobs and not self.input_logprobs
        return min(length, self.logprob_start_len) if scores else length

    @property
    def reserved_length(self) -> int:
        """Tokens of cache that the request may come to need."""
        return len(self.prompt_ids) + self.params.max_new_tokens

    def note_version(self, version: str, num_output: int) -> None:
        """Record that tokens from index `num_output` on come from weights `version`."""
        if self.versions and self.versions[-1][1] == num_output:
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, num_output))

    def version_spans(self) -> list[dict[str, Any]]:
        """Return {version, start, end} over the output tokens, `end` exclusive; one empty span when there are none."""
        if not self.output_ids:
            return [{"version": self.weight_version, "start": 0, "end": 0}]
        starts = [start for _, start in self.versions] + [len(self.output_ids)]
        spans = zip(self.versions, starts[1:], strict=False)
        return [{"version": version, "start": start, "end": end} for (version, start), end in spans if end > start]


def abort_reason(message: str) -> dict[str, Any]:
    """Return the finish_reason of an aborted request.

    >>> abort_reason("stopped")["type"]
    'abort'
    """
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
