"""Supervised fine-tuning as a rollout function: rows of the data source become samples with loss masks.

Select it with `--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss
--disable-compute-advantages-and-returns --debug-train-only`; no engine is asked. Two kinds of rows:
    chat     the prompt is a message list that ends with an assistant turn; every assistant turn is trained
    plain    prompt and label: the label's tokens and the end token are trained, the prompt is not
Policy for length: a sample longer than `--rollout-max-context-len`, or than the model's positions, is dropped and counted, as is one
without a trained token; the round is filled up with the next rows. Evaluation sets are tokenised the same way (`held_out_samples`);
the trainer computes their loss.
"""

from __future__ import annotations

import functools
import json
import logging

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.eval_rollout import eval_row_format
from slime.rollout.request import context_limit
from slime.rollout.round_end import out_of_prompts
from slime.utils.data import PromptSet
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import encode_prompt, load_tokenizer, render_chat
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

PATH = "slime.rollout.sft_rollout.generate_rollout"
MAX_DROPPED_PER_ROUND = 100
"""Rounds' worth of rows that may be dropped in a row before the data is taken to be wrong."""


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """Return `--rollout-batch-size` groups of one tokenised sample each.

    Raises:
        ValueError: no row fits. RuntimeError: no rows are left.
    """
    groups: list[list[Sample]] = []
    dropped = {"too_long": 0, "no_trained_token": 0}
    while len(groups) < args.rollout_batch_size:
        found = data_source.get_samples(args.rollout_batch_size - len(groups))
        if not found:
            raise out_of_prompts(rollout_id, len(groups), args.rollout_batch_size)
        for group in found:
            reason = _prepare(args, group[0])
            if reason is None:
                groups.append(group)
                continue
            dropped[reason] += 1
            data_source.mark_finished([group], "filtered")
            logger.warning("SFT sample %s dropped: %s", group[0].index, reason)
        if sum(dropped.values()) > MAX_DROPPED_PER_ROUND * args.rollout_batch_size:
            raise ValueError(
                f"SFT: {dropped} samples were dropped for one round of {args.rollout_batch_size}; check "
                f"--rollout-max-context-len {args.rollout_max_context_len}, the model's {context_limit(args)} positions and "
                f"--loss-mask-type {args.loss_mask_type}"
            )
    return RolloutFnTrainOutput(groups, {f"sft/dropped_{reason}": count for reason, count in dropped.items()})


def held_out_samples(args) -> dict[str, list[Sample]]:
    """The samples of each of `args.eval_datasets`, tokenised and masked like those of training, dropped ones left out.

    Raises:
        ValueError: no row of a set fits.
    """
    tokenizer, sets = _tokenizer(args.hf_checkpoint, args.trust_remote_code), {}
    for config in args.eval_datasets:
        rows = PromptSet(config.path, eval_row_format(args, config), tokenizer).samples
        kept = [sample for sample in rows if _prepare(args, sample) is None]
        if not kept:
            raise ValueError(
                f"evaluation set {config.name}: none of {len(rows)} rows of {config.path} can be trained on"
            )
        if len(kept) < len(rows):
            logger.warning("evaluation set %s: %d of %d rows dropped", config.name, len(rows) - len(kept), len(rows))
        for index, sample in enumerate(kept):
            sample.index = sample.group_index = index
        sets[config.name] = kept
    return sets


def _prepare(args, sample: Sample) -> str | None:
    """Fill tokens, mask and response of a sample; return why it must be dropped, or None.

    Raises:
        ValueError: there is nothing to train on, media, or the chat template fails.
    """
    if sample.multimodal_inputs:
        raise ValueError(f"SFT sample {sample.index} has media (--multimodal-keys): SFT trains on text only")
    tokenizer = _tokenizer(args.hf_checkpoint, args.trust_remote_code)
    if isinstance(sample.prompt, list) and sample.prompt[-1]["role"] == "assistant":
        options = json.dumps(sample.apply_chat_template_kwargs, sort_keys=True)
        generator = _mask_generator(args.hf_checkpoint, args.trust_remote_code, args.loss_mask_type, options)
        try:
            tokens, mask = generator.get_loss_mask(sample.prompt, tools=(sample.metadata or {}).get("tools"))
        except Exception as error:  # templates raise what they like
            first = f"{sample.prompt[0].get('content')!r:.60}"
            raise ValueError(f"SFT sample {sample.index}, which begins with {first}: {error}") from error
        response_length = generator.get_response_lengths([mask])[0]
    else:
        prompt_ids, answer_ids = _plain_ids(tokenizer, sample)
        tokens, mask = prompt_ids + answer_ids, [0] * len(prompt_ids) + [1] * len(answer_ids)
        response_length = len(answer_ids)
    limit = context_limit(args)
    if limit is not None and len(tokens) > limit:
        return "too_long"
    response_length = min(response_length, len(tokens) - 1)  # nothing predicts the first token
    if response_length <= 0:
        return "no_trained_token"
    sample.tokens = tokens
    sample.response_length = response_length
    sample.loss_mask = mask[-response_length:]
    sample.response = tokenizer.decode(tokens[-response_length:])
    sample.reward = 0
    return None


def _plain_ids(tokenizer, sample: Sample) -> tuple[list[int], list[int]]:
    """Return (prompt ids, label ids with the end token) of a row with prompt and label.

    Raises:
        ValueError: there is no label.
    """
    if sample.label is None:
        raise ValueError(
            f"SFT sample {sample.index} has a prompt that does not end with an assistant message and no label; give "
            "conversations under --input-key, or the answer under --label-key"
        )
    text = sample.prompt
    if isinstance(text, list):
        text = render_chat(tokenizer, text, (sample.metadata or {}).get("tools"), sample.apply_chat_template_kwargs)
    answer = tokenizer.encode(str(sample.label), add_special_tokens=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return encode_prompt(tokenizer, text), answer + end


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str, trust_remote_code: bool):
    return load_tokenizer(path, trust_remote_code=trust_remote_code)


@functools.lru_cache(maxsize=4)
def _mask_generator(
    path: str, trust_remote_code: bool, loss_mask_type: str, options: str
) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(_tokenizer(path, trust_remote_code), loss_mask_type, json.loads(options))
