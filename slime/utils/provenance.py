"""Where the tokens of a response come from: spans, and a span in words for error messages.

A span is `{"start", "end", "turn", "role", "source", "version"}` over response tokens: the turn counts the model's own turns
from 1, the role is "assistant" for what was sampled, the source is who gave the tokens ("engine", "chat template", "text", ...),
the version that of the weights. `Sample.append_response_tokens` records them; without records they are told from mask and
versions. Standard library only; knows no engine.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

Span = dict[str, Any]

SHOWN_TOKENS = 8
UNKNOWN_SOURCES = ("not recorded", "caller")


def record_span(spans: list[Span], start: int, versions: list, role: str, source: str) -> list[Span]:
    """`spans` and what follows for tokens from `start` on with these versions; pieces that only continue the last are joined."""
    spans = list(spans)
    position = start
    for version, run in groupby(versions):
        end = position + len(list(run))
        last = spans[-1] if spans else None
        same = last is not None and (last["role"], last["source"], last["version"]) == (role, source, version)
        if same and last["end"] == position:
            spans[-1] = {**last, "end": end}
        else:
            turn = _next_turn(last, role)
            spans.append(
                {"start": position, "end": end, "turn": turn, "role": role, "source": source, "version": version}
            )
        position = end
    return spans


def _next_turn(last: Span | None, role: str) -> int:
    """Turn of a new span: a sampled one after something else begins the next, the rest belongs to the turn that it follows."""
    if role != "assistant":
        return last["turn"] if last else 0
    if last is None:
        return 1
    return last["turn"] if last["role"] == "assistant" else last["turn"] + 1


def spans_of(sample: Any) -> list[Span]:
    """The recorded spans if they cover the response, else what mask and versions tell."""
    recorded = sample.token_spans
    if recorded and recorded[0]["start"] == 0 and recorded[-1]["end"] == sample.response_length:
        return recorded
    length = sample.response_length
    mask = _padded(sample.loss_mask, length, 1)
    versions = _padded(sample.token_weight_versions, length, None)
    spans: list[Span] = []
    for trained, run in groupby(range(length), key=lambda i: mask[i]):
        positions = list(run)
        part = versions[positions[0] : positions[-1] + 1]
        role = "assistant" if trained else "context"
        spans = record_span(spans, positions[0], part, role, "not recorded")
    return spans


def name_source(sample: Any, source: str) -> None:
    """Say who made the tokens whose origin nobody recorded: a function of the user's."""
    spans = spans_of(sample)
    if any(span["source"] in UNKNOWN_SOURCES for span in spans):
        sample.token_spans = [
            {**span, "source": source} if span["source"] in UNKNOWN_SOURCES else span for span in spans
        ]


def _padded(values: list | None, length: int, default: Any) -> list:
    values = list(values or [])[:length]
    return values + [default] * (length - len(values))


def describe(sample: Any, position: int) -> str:
    """The span around a response token in words, with its first token ids."""
    found = [span for span in spans_of(sample) if span["start"] <= position < span["end"]]
    source = vars(sample).get("source") or (sample.metadata or {}).get("source_name")
    data = f", data source {source}" if source else ""
    if not found:
        return f"response of {sample.response_length} tokens{data}"
    span = found[0]
    prompt_length = len(sample.tokens) - sample.response_length
    ids = list(sample.tokens[prompt_length + span["start"] : prompt_length + span["end"]])
    shown = ", ".join(map(str, ids[:SHOWN_TOKENS])) + (", ..." if len(ids) > SHOWN_TOKENS else "")
    return (
        f"response tokens [{span['start']}:{span['end']}), turn {span['turn']}, role {span['role']}, weight version "
        f"{span['version']}, from {span['source']}{data}: ids {shown}"
    )
