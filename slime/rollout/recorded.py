"""Engine calls as the tokens of a sample: sampled ids with log-probs, and masked context between them.

Knows request and reply bodies; does not know which sample a call belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime.utils.processing_utils import encode_prompt
from slime.utils.types import Sample


@dataclass
class Segment:
    """Tokens appended to a conversation: sampled ones with log-probs, or context with None.

    `role` and `source` are those of a context: of the messages it renders, and who encoded it.
    """

    ids: list[int]
    log_probs: list[float] | None = None
    meta_info: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    role: str | None = None
    source: str | None = None


@dataclass
class Chain:
    """One conversation as the engine saw it: prompt ids and what followed. `messages` ends with our last answer."""

    owner: int | None
    prompt_ids: list[int]
    messages: list[dict]
    segments: list[Segment] = field(default_factory=list)
    num_retokenized: int = 0
    is_busy: bool = False  # waits for an answer: another call beside it is a conversation of its own

    @property
    def response_length(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    def tokens(self) -> list[int]:
        return self.prompt_ids + [t for segment in self.segments for t in segment.ids]


def sampled_segment(output: dict[str, Any]) -> Segment:
    """What one engine reply sampled."""
    triples = output["meta_info"].get("output_token_logprobs") or []
    ids, log_probs = [int(triple[1]) for triple in triples], [float(triple[0]) for triple in triples]
    return Segment(ids, log_probs, output["meta_info"], output.get("text") or "")


def chain_of_calls(tokenizer, calls: list[tuple[dict, dict]]) -> Chain | None:
    """The calls as one growing conversation, or None if they are not one (or reported no log-probs)."""
    chain, text = None, ""
    for payload, output in calls:
        segment = sampled_segment(output) if "meta_info" in output else Segment([])
        if not segment.ids:
            return None
        context = _new_context(tokenizer, payload, chain, text)
        if context is None:
            return None
        if chain is None:
            chain = Chain(None, context, [])
        elif context:
            chain.segments.append(Segment(context, source="request"))
        chain.segments.append(segment)
        text = (payload.get("text") or "") + segment.text
    return chain


def _new_context(tokenizer, payload: dict[str, Any], chain: Chain | None, text: str) -> list[int] | None:
    """Ids that this call adds to the conversation so far; None if it does not continue it."""
    if payload.get("input_ids"):
        known = chain.tokens() if chain else []
        ids = list(payload["input_ids"])
        return ids[len(known) :] if ids[: len(known)] == known else None
    asked = payload.get("text")
    if not isinstance(asked, str) or not asked.startswith(text):
        return None
    if chain is None:
        return encode_prompt(tokenizer, asked)
    return tokenizer.encode(asked[len(text) :], add_special_tokens=False)


def fill_sample(args, sample: Sample, chain: Chain) -> None:
    """Make the recorded conversation the tokens of the sample; its readable `response` stays the user's."""
    response, status = sample.response, sample.status
    sample.tokens, sample.response = list(chain.prompt_ids), ""
    for segment in chain.segments:
        sample.append_response_tokens(
            args,
            tokens=segment.ids,
            log_probs=segment.log_probs,
            trainable=segment.log_probs is not None,
            meta_info=segment.meta_info,
            text=segment.text,
            role=segment.role,
            source=segment.source,
        )
    sample.response = response or sample.response
    if status != Sample.Status.PENDING:
        sample.status = status
    if chain.num_retokenized:
        sample.metadata["tokens_from_text"] = chain.num_retokenized
