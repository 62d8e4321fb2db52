"""`generate_single(conversation)`: one assistant turn for agent code that thinks in messages.

Behind the text that it returns, the ids and log-probs of every engine call are recorded, so that training sees exactly
what was sampled. Invariants: the context of a later turn is the recorded tokens plus the template's text for the new
messages, never the earlier turns encoded again; that text is masked. Calls are attributed to samples by the identity of
the prompt's messages, which survives copies of the list.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from typing import Any

from slime.rollout.call_seeds import CallSeeds
from slime.rollout.engine_control import get_model_url
from slime.rollout.generate_state import GenerateState, uses_sampling_seeds
from slime.rollout.recorded import Chain, Segment, chain_of_calls, fill_sample, sampled_segment
from slime.rollout.request import expanded_ids, request_headers, request_of_ids, token_budget, within_budget
from slime.utils.http_utils import observed_posts, post
from slime.utils.processing_utils import MEDIA_PLACEHOLDERS, encode_prompt, render_chat
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_current: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("slime_recorder", default=None)
_PROBE = "slimeassistantturn"


class RoundEnded(BaseException):
    """A turn was cut short, or nobody wants it any more: what the function has begun is begun anew in a later round.

    No Exception, so that a function that catches those does not go on with half a turn.
    """


class OwnedText(str):
    """Prompt text that remembers the position of its sample."""

    owner: int


class OwnedMessage(dict):
    """Prompt message that remembers the position of its sample."""

    owner: int


def owned_prompt(prompt: str | list[dict], owner: int) -> str | list[dict]:
    """The prompt with the owner attached to its parts."""
    if isinstance(prompt, str):
        text = OwnedText(prompt)
        text.owner = owner
        return text
    messages = []
    for message in prompt:
        owned = OwnedMessage(message)
        owned.owner = owner
        messages.append(owned)
    return messages


class Recorder:
    """Engine calls made on behalf of some samples (named by position), rendered with the first one's template options."""

    def __init__(self, args, sampling_params: dict[str, Any], evaluation: bool, owners: list[Sample]) -> None:
        self.args, self.sampling_params, self.evaluation = args, sampling_params, evaluation
        self.owners, self.sample_indices = owners, [sample.index for sample in owners]
        self._template_kwargs = owners[0].apply_chat_template_kwargs  # None where a user's code gives none
        self.chains: list[Chain] = []
        self.posted: list[tuple[dict, dict]] = []
        self._seeds = CallSeeds(args)
        self._seed = sampling_params.get("sampling_seed")  # of the first call that the function makes itself
        self._has_asked = False

    # ---- during generation -----------------------------------------------------------------------------------------

    def open_chain(self, conversation: list[dict], tools: list | None) -> tuple[Chain, Segment | None]:
        """The chain that `conversation` continues (or a new one) and the context to append before sampling."""
        state = GenerateState(self.args)
        owner = self._owner(conversation)
        for chain in reversed(self.chains):
            known = len(chain.messages)
            goes_on = chain.owner == owner and not chain.is_busy and len(conversation) >= known
            if goes_on and _same(conversation[:known], chain.messages):
                new = conversation[known:]
                ids = self._context_ids(state.tokenizer, conversation[: known - 1], new, tools, chain)
                roles = "+".join(dict.fromkeys(str(message.get("role")) for message in new))
                return chain, Segment(ids, role=roles or None, source="chat template")
        return self._new_chain(state, conversation, tools, owner)

    def _new_chain(self, state, conversation: list[dict], tools, owner) -> tuple[Chain, Segment | None]:
        """A new conversation, or one whose recorded turns were edited (then the edited text is masked context)."""
        text = render_chat(state.tokenizer, conversation, tools, self._template_kwargs)
        ids = encode_prompt(state.tokenizer, text)
        for chain in reversed(self.chains):
            shared = len(chain.prompt_ids)
            same_owner = owner is not None and chain.owner == owner and not chain.is_busy
            edited = same_owner and ids[:shared] == chain.prompt_ids
            if edited and len(conversation) > 1 and _same(conversation[:1], chain.messages[:1]):
                logger.debug(
                    "conversation of sample %s was edited: earlier turns become masked context", self._index(owner)
                )
                fresh = Chain(owner, chain.prompt_ids, [], num_retokenized=len(ids) - shared)
                self.chains[self.chains.index(chain)] = fresh
                return fresh, Segment(ids[shared:], role="edited turns", source="chat template")
        chain = Chain(owner, ids, [])
        self.chains.append(chain)
        return chain, None

    def _context_ids(
        self, tokenizer, before: list[dict], new: list[dict], tools: list | None, chain: Chain
    ) -> list[int]:
        """Ids of what the template puts between our last answer and the next one.

        A probe stands for the answer, so nothing depends on how the template renders earlier turns. An end token that the
        model sampled itself is not repeated.
        """
        messages = [*before, {"role": "assistant", "content": _PROBE}, *new]
        rendered = render_chat(tokenizer, messages, tools, self._template_kwargs)
        tail = rendered[rendered.rindex(_PROBE) + len(_PROBE) :]
        ids = tokenizer.encode(tail, add_special_tokens=False)
        last = chain.segments[-1].ids if chain.segments else []
        if last and ids and last[-1] == ids[0] and ids[0] in tokenizer.all_special_ids:
            ids = ids[1:]
        return ids

    def _owner(self, conversation: list[dict]) -> int | None:
        if len(self.sample_indices) == 1:
            return 0
        for message in conversation:
            for value in (message, message.get("content")):
                if isinstance(value, (OwnedMessage, OwnedText)):
                    return value.owner
        return None

    def _index(self, owner: int | None) -> int | None:
        return None if owner is None else self.sample_indices[owner]

    def params_for(self, chain: Chain, prompt: list[int], overrides: dict[str, Any] | None) -> dict[str, Any]:
        """The parameters of the chain's next call, whose prompt is what the engine reads."""
        params = {**self.sampling_params, **(overrides or {})}
        if uses_sampling_seeds(self.args):
            round_name = "eval" if self.evaluation else GenerateState(self.args).rollout_id
            known = chain.owner is not None
            who = (
                self.sample_indices[chain.owner]
                if known
                else f"chain {self.chains.index(chain)} of {self.sample_indices[0]}"
            )
            params["sampling_seed"] = self._seeds.of_call(prompt, round_name, who, "turn")
        return params

    def check_goes_on(self, output: dict[str, Any] | None = None) -> None:
        """Raises: RoundEnded when the round is over, or `output` was cut short; evaluations take what they get."""
        reason = output["meta_info"].get("finish_reason") if output is not None else None
        was_cut = (reason.get("type") if isinstance(reason, dict) else reason) == "abort"
        if not self.evaluation and (was_cut or GenerateState(self.args).aborted):
            raise RoundEnded

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def attribute_rest(self) -> None:
        """Give chains without an owner to the samples without a chain, in order, when the numbers agree."""
        loose = [chain for chain in self.chains if chain.owner is None]
        taken = {chain.owner for chain in self.chains}
        free = [position for position in range(len(self.sample_indices)) if position not in taken]
        if loose and len(loose) == len(free):
            for chain, position in zip(loose, free, strict=True):
                chain.owner = position
        elif loose:
            logger.warning(
                "%d conversations of generate_single cannot be told apart (build them from sample.prompt): "
                "the responses are encoded from their text",
                len(loose),
            )

    def has_calls(self, position: int) -> bool:
        return any(chain.owner == position for chain in self.chains)

    def fill(self, sample: Sample, position: int) -> None:
        """Make the recorded conversation the tokens of the sample; its readable `response` stays the user's."""
        chains = [chain for chain in self.chains if chain.owner == position]
        chain = max(chains, key=lambda c: sum(len(s.ids) for s in c.segments if s.log_probs is not None))
        if len(chains) > 1:
            GenerateState(self.args).counters["unused_conversations"] += len(chains) - 1
        fill_sample(self.args, sample, chain)

    def fill_from_posts(self, sample: Sample) -> bool:
        """Use `/generate` calls that the hook posted itself, if they can be recognised as this sample's."""
        tokenizer = GenerateState(self.args).tokenizer
        chain = None
        if len(self.sample_indices) == 1:
            chain = chain_of_calls(tokenizer, self.posted)
        if chain is None:
            said = [call for call in self.posted if (call[1].get("text") or "").strip() == sample.response.strip()]
            chain = chain_of_calls(tokenizer, said[:1])
        if chain is None:
            return False
        if any(payload.get(f"{kind}_data") for payload, _ in self.posted for kind in MEDIA_PLACEHOLDERS):
            chain.prompt_ids = expanded_ids(GenerateState(self.args), sample, chain.prompt_ids)
        fill_sample(self.args, sample, chain)
        return True

    def prepare(self, url: str, payload: Any) -> Any:
        """A request to the engines with a seed of its own, unless the function chose one."""
        if self._seed is None or url != get_model_url(self.args) or not isinstance(payload, dict):
            return payload
        params = payload.get("sampling_params") or {}
        if not isinstance(params, dict) or params.get("sampling_seed", self._seed) != self._seed:
            return payload
        seed = self._seed
        if self._has_asked:
            seed = self._seeds.of_call(payload.get("input_ids") or payload.get("text"), self._seed)
        self._has_asked = True
        return {**payload, "sampling_params": {**params, "sampling_seed": seed}}

    def observe(self, url: str, payload: Any, output: Any) -> None:
        """Remember a reply to `http_utils.post`.

        Raises: ValueError when the engines sampled the base model where adapters are trained.
        """
        forgot_adapter = self.args.lora_sync == "adapter" and isinstance(payload, dict) and not payload.get("lora_path")
        if forgot_adapter and url == get_model_url(self.args):
            raise ValueError(
                "--lora-sync adapter: a request of --custom-generate-function-path has no lora_path, so the base model answered; "
                'add "lora_path": args.lora_adapters[0] (or the name of the sample\'s adapter)'
            )
        if url.endswith("/generate") and isinstance(payload, dict) and isinstance(output, dict):
            read_later = ("text", "input_ids", *(f"{kind}_data" for kind in MEDIA_PLACEHOLDERS))
            kept = {name: payload[name] for name in read_later if payload.get(name)}
            if "input_ids" in kept:
                kept["input_ids"] = list(kept["input_ids"])  # hooks grow them in place
            self.posted.append((kept, output))


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Record the engine calls made inside, also in tasks started there."""
    token = _current.set(recorder)
    try:
        with observed_posts(recorder):
            yield recorder
    finally:
        _current.reset(token)


def _refuse_media(conversation: list[dict[str, Any]]) -> None:
    for message in conversation:
        content = message.get("content")
        kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        if not MEDIA_PLACEHOLDERS.keys().isdisjoint(kinds):
            raise ValueError(
                "generate_single asks in text alone, but a message holds media: leave them out, or post "
                "slime.rollout.request.build_request(args, sample, sampling_params) to the engines"
            )


async def generate_single(
    conversation: list[dict[str, Any]] | str,
    *,
    tools: list | None = None,
    sampling_params: dict[str, Any] | None = None,
) -> str:
    """The model's next turn for a list of messages (or one user text), without its end-of-turn token.

    Args:
        tools: tool schemas for the chat template.
        sampling_params: overrides for this call, for example `{"stop": ["</tool>"]}`.

    Returns the text; "" when the response or context limit leaves no room. Works only inside a custom generate function.
    Raises: ValueError for messages with media, which would be left out. RoundEnded, which nobody has to catch.
    """
    recorder = _current.get()
    if recorder is None:
        raise RuntimeError("generate_single works only inside a --custom-generate-function-path function")
    if isinstance(conversation, str):
        conversation = [{"role": "user", "content": conversation}]
    args = recorder.args
    _refuse_media(conversation)
    recorder.check_goes_on()
    messages = [type(m)(m) if not isinstance(m, OwnedMessage) else m for m in conversation]
    chain, context = recorder.open_chain(messages, tools)
    pending = context.ids if context is not None else []
    tokens = chain.tokens() + pending
    params = recorder.params_for(chain, tokens, sampling_params)
    used = chain.response_length + len(pending)
    budget = token_budget(args, len(chain.prompt_ids) + used, used, params["max_new_tokens"], recorder.evaluation)
    if budget <= 0:
        if chain.segments:
            chain.segments[-1].meta_info = {**chain.segments[-1].meta_info, "finish_reason": {"type": "length"}}
        return ""
    owner = None if chain.owner is None else recorder.owners[chain.owner]
    output = await _ask(args, owner, chain, tokens, within_budget(params, budget, 0))
    recorder.check_goes_on(output)
    text = _record(GenerateState(args).tokenizer, chain, context, output)
    chain.messages = [*messages, {"role": "assistant", "content": text}]
    return text


async def _ask(args, owner: Sample | None, chain: Chain, tokens: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """The engine's answer to the chain's ids; calls that are made meanwhile begin conversations of their own."""
    chain.is_busy = True
    try:
        with observed_posts(None):
            payload, headers = request_of_ids(args, tokens, params, owner), request_headers(args, owner)
            return await post(get_model_url(args), payload, headers=headers)
    finally:
        chain.is_busy = False


def _record(tokenizer, chain: Chain, context: Segment | None, output: dict[str, Any]) -> str:
    """Append the context and the sampled tokens to the chain; returns the text without the end token."""
    segment = sampled_segment(output)
    if context is not None and context.ids:
        context.text = tokenizer.decode(context.ids)
        chain.segments.append(context)
    chain.segments.append(segment)
    last = segment.ids[-1:]
    end = tokenizer.decode(last) if last and last[0] in tokenizer.all_special_ids else ""
    return segment.text.removesuffix(end) if end else segment.text


def _same(messages: list[dict], others: list[dict]) -> bool:
    """Whether two message lists say the same; our own answers are compared by content without outer spaces."""
    return len(messages) == len(others) and all(
        a.get("role") == b.get("role") and _text(a).strip() == _text(b).strip()
        for a, b in zip(messages, others, strict=True)
    )


def _text(message: dict) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else repr(content)
