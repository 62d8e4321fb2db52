"""Building one `/generate` request: prompt ids, token budget, body and headers.

Invariants: prompt + response never exceed the context limits, the response never exceeds its limit over all attempts.
Knows SGLang's field names; sends nothing.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from slime.rollout.generate_state import GenerateState
from slime.utils.http_utils import HTTPStatusError
from slime.utils.plain_data import same, with_shared_leaves
from slime.utils.processing_utils import (
    MEDIA_PLACEHOLDERS,
    encode_prompt,
    encode_with_media,
    media_for_engine,
    render_chat,
)
from slime.utils.sample_adapter import adapter_number
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

PROMPT_TOO_LONG = "prompt_too_long"


def prompt_text(tokenizer, sample: Sample) -> str:
    """The sample's prompt as text; a message list is rendered with the chat template."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    try:
        return render_chat(tokenizer, sample.prompt, sample.metadata.get("tools"), sample.apply_chat_template_kwargs)
    except Exception as error:  # templates raise what they like
        raise ValueError(f"sample {sample.index}: the chat template failed on its prompt: {error}") from error


def prompt_ids(state: GenerateState, sample: Sample) -> list[int]:
    """Token ids of the prompt; with media, the processor's ids, whose other outputs go to the trainer."""
    text, media = prompt_text(state.tokenizer, sample), sample.multimodal_inputs
    if not media or state.processor is None:
        return _unexpanded_ids(state, text)
    if state.last_media is None or state.last_media[0] != text or not same(state.last_media[1], media):
        found = encode_with_media(state.processor, text, media)
        state.last_media = (text, with_shared_leaves(media), *found)  # the list may be appended to
    ids, train_inputs = state.last_media[2:]
    sample.multimodal_train_inputs = dict(train_inputs) or None
    return list(ids)


def _unexpanded_ids(state: GenerateState, text: str) -> list[int]:
    """Ids of the text, one for each placeholder of a medium."""
    if state.last_prompt[0] != text:  # the samples of a group come one after another
        state.last_prompt = (text, encode_prompt(state.tokenizer, text))
    return list(state.last_prompt[1])


def engine_ids(state: GenerateState, sample: Sample) -> list[int]:
    """The sample's ids as an engine wants them: with media, the prompt's placeholders are not expanded.

    SGLang 0.5.23 expands them itself and keeps all other ids as they are. More of them than media, because they are expanded already
    or the model sampled one, and it never answers.

    Raises: ValueError when the response holds one.
    """
    if not sample.multimodal_inputs or state.processor is None:
        return list(sample.tokens)
    if _sampled_media_token(state, sample):
        raise ValueError(
            f"sample {sample.index}: its response holds the token of a medium, which an engine would expand"
        )
    return _unexpanded_ids(state, prompt_text(state.tokenizer, sample)) + sample.tokens[sample.prompt_length :]


def expanded_ids(state: GenerateState, sample: Sample, ids: list[int]) -> list[int]:
    """The inverse for prompt ids that an engine was sent: what it has read; the processor's other outputs go to the trainer."""
    if not sample.multimodal_inputs or state.processor is None:
        return ids
    found, train_inputs = encode_with_media(state.processor, state.tokenizer.decode(ids), sample.multimodal_inputs)
    sample.multimodal_train_inputs = sample.multimodal_train_inputs or train_inputs or None
    return found


def _sampled_media_token(state: GenerateState, sample: Sample) -> bool:
    tokens = {getattr(state.processor, f"{kind}_token_id", None) for kind in MEDIA_PLACEHOLDERS}
    return not tokens.isdisjoint(sample.tokens[sample.prompt_length :])


def check_engine_prompt(sample: Sample, meta_info: dict[str, Any]) -> None:
    """With media, the engine must have read as many tokens as the sample has; call it before its answer is appended.

    Raises: ValueError when its processor expanded them otherwise than the one of --hf-checkpoint.
    """
    count, triples = meta_info.get("prompt_tokens"), meta_info.get("output_token_logprobs")
    if (
        sample.multimodal_inputs
        and sample.multimodal_train_inputs
        and triples
        and count not in (None, len(sample.tokens))
    ):
        raise ValueError(
            f"sample {sample.index}: the engine read {count} tokens, the processor of --hf-checkpoint made {len(sample.tokens)} of "
            "the prompt, its media and the response so far: both must expand media alike (the same model folder, the same limits "
            "of pixels; SGLang has --sglang-mm-process-config)"
        )


def fill_prompt(state: GenerateState, sample: Sample) -> None:
    """Give a sample without a response its prompt ids, and those of its media's train inputs that it lacks."""
    kinds = (sample.multimodal_inputs or {}).values()  # None or [] where a row has none of them
    if state.processor is None and any(items is not None and len(items) for items in kinds):
        raise ValueError(
            f"sample {sample.index} has media (--multimodal-keys), but --hf-checkpoint {state.args.hf_checkpoint} has no processor "
            "that reads them, or one that needs a package that is not installed; give a model folder with one, or a "
            "--custom-generate-function-path that looks at them"
        )
    if sample.multimodal_inputs and _sampled_media_token(state, sample):
        logger.warning(
            "sample %s: no engine can continue its response, which holds the token of a medium: it starts again",
            sample.index,
        )
        sample.reset_response()
    lacks_media = sample.multimodal_inputs and sample.multimodal_train_inputs is None
    if not sample.tokens or (lacks_media and sample.response_length == 0):
        sample.tokens = prompt_ids(state, sample)


def context_limit(args, evaluation: bool = False) -> int | None:
    """The smallest limit on prompt + response that is known: the flags', the engine's, the model's."""
    arch = args.model_arch or {}
    model = arch.get("max_position_embeddings") or (arch.get("text_config") or {}).get("max_position_embeddings")
    flag = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    return min((n for n in (flag, args.sglang_context_length or model) if n), default=None)


def new_token_budget(args, sample: Sample, max_new_tokens: int | None, evaluation: bool = False) -> int:
    """Tokens that may still be generated; 0 or less: none."""
    return token_budget(args, len(sample.tokens), sample.response_length, max_new_tokens, evaluation)


def token_budget(args, num_tokens: int, response_length: int, max_new_tokens: int | None, evaluation: bool) -> int:
    """Tokens that may follow `num_tokens`, of which `response_length` belong to the response already."""
    limit = context_limit(args, evaluation)
    room = None if limit is None else limit - num_tokens
    left = None if max_new_tokens is None else max_new_tokens - response_length
    budgets = [value for value in (room, left) if value is not None]
    if not budgets:
        raise ValueError("the response has no limit: give --rollout-max-response-len or --rollout-max-context-len")
    return min(budgets)


def within_budget(sampling_params: dict[str, Any], budget: int, response_length: int) -> dict[str, Any]:
    """The parameters of a call for at most `budget` tokens that follow a response of this length.

    A least number of new tokens counts from the response's beginning, and never exceeds what there is room for.
    """
    least = sampling_params.get("min_new_tokens")
    bounds = {"min_new_tokens": min(max(0, least - response_length), budget)} if least else {}
    return {**sampling_params, "max_new_tokens": budget, **bounds}


def next_request(
    args, state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> dict[str, Any] | None:
    """Body of the call that starts or continues a sample; None when there is no room for a token, as its status says then."""
    fill_prompt(state, sample)
    budget = new_token_budget(args, sample, sampling_params["max_new_tokens"], evaluation)
    if budget > 0:
        return build_request(args, sample, within_budget(sampling_params, budget, sample.response_length))
    if sample.response_length == 0:
        mark_prompt_too_long(args, state, sample, evaluation)
    else:
        sample.status = Sample.Status.TRUNCATED
    return None


def build_request(args, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Body of `/generate` that starts or continues this sample."""
    ids = engine_ids(GenerateState(args), sample)
    return request_of_ids(args, ids, sampling_params, sample) | media_for_engine(sample.multimodal_inputs)


def request_of_ids(
    args, ids: list[int], sampling_params: dict[str, Any], sample: Sample | None = None
) -> dict[str, Any]:
    """Body of `/generate` for these ids, on behalf of `sample` where there is one."""
    payload = {
        "rid": uuid.uuid4().hex,
        "input_ids": ids,
        "sampling_params": sampling_params,
        "return_logprob": True,
    }
    if args.use_rollout_routing_replay:
        payload["return_routed_experts"] = True
    adapter = adapter_of(args, sample)
    if adapter is not None:
        payload["lora_path"] = adapter
    return payload


def adapter_of(args, sample: Sample | None) -> str | None:
    """Name of the engines' adapter that the sample goes through; None where they serve the merged model.

    Raises:
        ValueError: several adapters are trained and the sample's metadata does not name one of them.
    """
    if args.lora_sync != "adapter":
        return None
    return args.lora_adapters[adapter_number(sample, args.lora_adapters)]


def request_headers(args, sample: Sample | None) -> dict[str, str] | None:
    """The routing key, where the router's policy honours it."""
    if args.router_policy == "consistent_hashing" and sample is not None and sample.session_id:
        return {"X-SMG-Routing-Key": sample.session_id}
    return None


def append_engine_output(args, sample: Sample, output: dict[str, Any], update_terminal_info: bool = True) -> None:
    """Add what the engine sampled to the response."""
    meta_info = output["meta_info"]
    triples = meta_info.get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[triple[1] for triple in triples],
        log_probs=[triple[0] for triple in triples],
        meta_info=meta_info,
        text=output.get("text") or "",
        update_terminal_info=update_terminal_info,
    )


def response_text(state: GenerateState, sample: Sample, sampling_params: dict[str, Any]) -> str:
    """What the tokens of the response say."""
    skip = bool(sampling_params.get("skip_special_tokens"))
    ids = sample.tokens[sample.prompt_length :]
    return state.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def says_its_tokens(state: GenerateState, sample: Sample, sampling_params: dict[str, Any]) -> bool:
    """Whether the response is the text of its tokens, so that it can be told anew when more tokens follow.

    The texts of two calls, put together, may lack a space or have a broken character where the first one ended.
    """
    if sample.response_length == 0:
        return not sample.response
    told = sampling_params.get("no_stop_trim") and response_text(state, sample, sampling_params)
    return bool(told) and told.strip() == sample.response.strip()


def says_context_too_long(error: HTTPStatusError) -> bool:
    """Whether the engine refused a request because the prompt is longer than its context."""
    return error.status == 400 and "context" in error.body.lower()


def mark_prompt_too_long(args, state: GenerateState, sample: Sample, evaluation: bool) -> None:
    """The prompt leaves no room for a response: FAILED with reward 0; training drops its group."""
    limit = context_limit(args, evaluation)
    logger.warning(
        "sample %s: prompt of %d tokens leaves no room in a context of %s: skipped",
        sample.index,
        len(sample.tokens),
        limit,
    )
    key = (args.eval_reward_key or args.reward_key) if evaluation else args.reward_key
    sample.status, sample.remove_sample = Sample.Status.FAILED, True
    sample.reward = {key: 0.0} if key else 0.0
    sample.metadata["generate_error"] = PROMPT_TOO_LONG
    if not evaluation:
        state.counters[PROMPT_TOO_LONG] += 1
