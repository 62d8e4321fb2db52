"""What happens to groups at the end of a round, whichever loop ran it: order, hooks, and the way back to the buffer."""

from __future__ import annotations

import logging
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import PROMPT_TOO_LONG
from slime.utils.hook_calls import call_hook
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def first_index(group: list) -> int:
    """Sort key of groups: the index of their first sample."""
    return leaves_of(group)[0].index or 0


def is_finished(group: list) -> bool:
    return all(leaf.status in FINISHED for leaf in leaves_of(group))


def is_aborted(group: list) -> bool:
    return any(leaf.status == Sample.Status.ABORTED for leaf in leaves_of(group))


def prepare_for_buffer(group: list, rollout_id: int, restart: bool) -> list:
    """A group as it goes back: what may go on later stays and says when it began.

    Args:
        restart: it starts again from its prompt; so does what cannot be continued, an unfinished fan-out.
    """
    finished = is_finished(group)
    if restart or not (finished or all(isinstance(item, Sample) for item in group)):
        firsts = [leaves_of(item)[0] for item in group]
        for leaf in firsts:
            leaf.reset_response()
        return firsts
    for leaf in leaves_of(group):
        if not finished and leaf.metadata.get("reward_error"):
            leaf.reset_response()
        if leaf.response_length > 0:
            leaf.metadata.setdefault("start_rollout_id", rollout_id)
    return group


def check_size(args, group: list) -> None:
    """Raises: ValueError for a group that has not --n-samples-per-prompt samples; a split one counts once."""
    if len(group) != args.n_samples_per_prompt:
        raise ValueError(
            f"--data-source-path {args.data_source_path} gave a group of {len(group)} samples, "
            f"--n-samples-per-prompt is {args.n_samples_per_prompt}"
        )


def counted(state: GenerateState) -> dict[str, int]:
    """Metrics of what was counted in a round: what failed, and responses that are not what an engine was asked for."""
    names = ("generation_failed", PROMPT_TOO_LONG, "text_only_samples", "unused_conversations")
    metrics = {f"rollout/{name}": state.counters[name] for name in names if name in state.counters}
    return {"rollout/reward_failed": state.counters["reward_failed"], **metrics}


def check_getting_on(args, data_source: Any, rollout_id: int, num_kept: int, num_dropped: int, reasons: str) -> None:
    """An endless supply of dropped groups is an error, not a round that never ends."""
    limit = max(20 * args.rollout_batch_size, 20 * (args.over_sampling_batch_size or 0), 2 * len(data_source))
    if not num_kept and num_dropped >= limit:
        raise RuntimeError(
            f"round {rollout_id}: {num_dropped} groups in a row were dropped and none kept, reasons {reasons}; check the reward, "
            "--dynamic-sampling-filter-path and the prompt lengths"
        )


def out_of_prompts(rollout_id: int, num_kept: int, target: int) -> RuntimeError:
    """The error of a data source that gives nothing when a round needs more."""
    return RuntimeError(f"round {rollout_id}: the data source has no more prompts after {num_kept} of {target} groups")


def check_rewards(state: GenerateState, kept: list[list], rollout_id: int) -> None:
    """Say how many rewards failed; RuntimeError with the first traceback when no sample of the round got one."""
    leaves = leaves_of(kept)
    failed = [what for what in ("generation", "reward") if state.counters[f"{what}_failed"]]
    for what in failed:
        logger.warning(
            "round %d: %d %ss failed; their samples are out of the loss (rollout/%s_failed)",
            *(rollout_id, state.counters[f"{what}_failed"], what, what),
        )
    if state.first_failure and all(leaf.metadata.get("reward_error") for leaf in leaves):
        raise RuntimeError(
            f"round {rollout_id}: the {' or '.join(failed)} of all {len(leaves)} samples failed; the first one:\n"
            f"{state.first_failure}"
        )


def run_round_hooks(args, kept: list[list], all_groups: list[list], data_source: Any) -> None:
    """The sample filter on the kept groups, then the hook that sees all groups, dropped ones included."""
    if args.rollout_sample_filter_path:
        option, groups = "rollout_sample_filter_path", list(kept)
        answer = call_hook(args, option, args, groups)
        if answer is not None or [id(group) for group in groups] != [id(group) for group in kept]:
            logger.warning(
                "--rollout-sample-filter-path %s: what it returns, and groups that it takes out of the list, have no effect; it "
                "marks samples by sample.remove_sample = True",
                args.rollout_sample_filter_path,
            )
    if args.rollout_all_samples_process_path:
        call_hook(args, "rollout_all_samples_process_path", args, all_groups, CallableSource(data_source))


class CallableSource:
    """The data source as the all-samples hook gets it: an object, and callable as its `get_samples`."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __call__(self, num_samples: int) -> list[list[Sample]]:
        return self._source.get_samples(num_samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
