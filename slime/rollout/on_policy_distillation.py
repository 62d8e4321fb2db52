"""On-policy distillation with the teacher on an engine: its log-probs of the student's tokens come with the samples.

`--use-opd --opd-type sglang --custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url http://TEACHER/generate`. The
teacher must have the student's tokenizer. The reward is 0 (pure distillation); a reward function of yours that awaits
`score_with_teacher(args, sample)` and returns its own number adds a task reward.
"""

from __future__ import annotations

import math

from slime.config.distillation import against_teacher_on_engine
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import engine_ids
from slime.rollout.rm_hub.remote import MAX_ATTEMPTS, SHARE_OF_TIMEOUT
from slime.utils.http_utils import post
from slime.utils.processing_utils import media_for_engine
from slime.utils.types import Sample


async def reward_func(args, sample: Sample, **kwargs) -> float:
    """Set `sample.teacher_log_probs` and return 0.

    Raises: as `score_with_teacher`.
    """
    await score_with_teacher(args, sample)
    return 0.0


def post_process_rewards(args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Return the rewards as they are, twice: no comparison within a prompt's group (`--custom-reward-post-process-path`)."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    return rewards, list(rewards)


async def score_with_teacher(args, sample: Sample) -> None:
    """Ask the engine at `--rm-url` for the log-probs of the sample's response; they become `sample.teacher_log_probs`.

    Raises: ValueError without --rm-url, with a --rollout-temperature or --rollout-top-p that the teacher does not score at, or when
        the answer does not fit the response; otherwise as `http_utils.post`.
    """
    problem = next(against_teacher_on_engine(args), None)
    if problem is not None:
        raise ValueError(problem)
    limits = {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False}
    ids = engine_ids(GenerateState(args), sample) if sample.multimodal_inputs else sample.tokens
    payload = {"input_ids": ids, "sampling_params": limits, "return_logprob": True, "logprob_start_len": 0}
    payload |= media_for_engine(sample.multimodal_inputs)
    reply = await post(args.rm_url, payload, max_retries=MAX_ATTEMPTS, deadline_s=SHARE_OF_TIMEOUT * args.rm_timeout)
    sample.teacher_log_probs = _of_response(reply, sample, args.rm_url)


def _of_response(reply, sample: Sample, url: str) -> list[float]:
    try:
        scored = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"--rm-url {url}: the teacher's answer holds no meta_info.input_token_logprobs") from None
    if len(scored) != len(sample.tokens) - 1:
        raise ValueError(
            f"--rm-url {url}: {len(scored)} log-probs for {len(sample.tokens)} tokens of sample {sample.index}"
        )
    wanted = scored[len(scored) - sample.response_length :]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in wanted):
        raise ValueError(f"--rm-url {url}: a log-prob of sample {sample.index} is no finite number")
    return [float(value) for value in wanted]
