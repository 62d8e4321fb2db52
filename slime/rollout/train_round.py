"""One training round: keep asking for groups until enough passed the filter, then stop the rest.

Invariants: exactly --rollout-batch-size groups are kept, sorted by the index of their first sample; every group taken
from the data source ends kept, filtered, aged out, failed, or back in the buffer, and is counted; an error leaves no running
task. When to start groups and when to stop is the policy's decision (`round_policy`). Does not know how a group is generated or
what the filter looks at.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slime.rollout import generation
from slime.rollout.base_types import RolloutFnTrainOutput, leaves_of
from slime.rollout.engine_control import abort_all
from slime.rollout.filter_hub.base_types import MetricGatherer, filter_group
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import PROMPT_TOO_LONG
from slime.rollout.round_end import (
    check_getting_on,
    check_rewards,
    check_size,
    counted,
    first_index,
    is_finished,
    out_of_prompts,
    prepare_for_buffer,
    run_round_hooks,
)
from slime.rollout.round_policy import DROP, RESTART, RoundView, age_of
from slime.rollout.sample_state import duplicate_group
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 30.0


class TrainRound:
    """State of one round; `run` returns its output."""

    def __init__(self, args, rollout_id: int, data_source) -> None:
        self.args, self.rollout_id, self.data_source = args, rollout_id, data_source
        self.target = args.rollout_batch_size
        self.state = GenerateState(args)
        self.policy = self.state.policy_for(args)
        self.passed: list[list] = []  # finished, through the filter, in the order of arrival
        self.all_groups: list[list] = []
        self.dropped = MetricGatherer()
        self.num_dropped = self.num_aged_out = self.num_fetched = 0
        self.origin: dict[asyncio.Task, list[Sample]] = {}  # groups as handed out, until dropped
        self.due: set[asyncio.Task] = set()  # have to be trained in this round
        self._ended: list[asyncio.Task] = []  # and not taken yet
        self._some_ended = asyncio.Event()

    async def run(self) -> RolloutFnTrainOutput:
        self.state.reset()
        self.state.rollout_id = self.rollout_id
        self.state.progress.set_total("generate", self.target)
        try:
            self._top_up()
            while not self.policy.is_over(self._view()):
                if not self.state.pendings:
                    break
                for task in sorted(await self._next_ended(), key=self._order):
                    self._take(task)
                self._top_up()
            leftovers = await self._stop_rest()
        except BaseException:
            await self._cancel_all()
            raise
        return self._finish(leftovers)

    async def _next_ended(self) -> list[asyncio.Task]:
        """Wait for tasks to end, and take those that have. `asyncio.wait` would look at all that run each time one ends."""
        await self._some_ended.wait()
        self._some_ended.clear()
        ended, self._ended = self._ended, []
        self.state.pendings.difference_update(ended)
        return ended

    def _note_end(self, task: asyncio.Task) -> None:
        self._ended.append(task)
        self._some_ended.set()

    def _order(self, task: asyncio.Task) -> int:
        return leaves_of(self.origin[task])[0].index or 0

    def _view(self) -> RoundView:
        running = self.state.pendings
        return RoundView(self.rollout_id, self.target, len(self.passed), len(running), len(self.due & running))

    def _top_up(self) -> None:
        while (wanted := self.policy.num_to_start(self._view())) > 0:
            self._submit(wanted)
        self.state.remaining_batch_size = len(self.passed) + len(self.state.pendings)

    def _submit(self, wanted: int) -> None:
        groups = self.data_source.get_samples(wanted)
        if not groups:
            raise out_of_prompts(self.rollout_id, len(self.passed), self.target)
        self.num_fetched += len(groups)
        for group in groups:
            age = age_of(group, self.rollout_id)
            if self.policy.is_too_old(age):
                self._age_out(group)
                continue
            call = generation.generate_and_rm_group(self.args, group, dict(self.state.sampling_params))
            task = asyncio.ensure_future(call)
            task.add_done_callback(self._note_end)
            self.origin[task] = group
            self.state.pendings.add(task)
            if self.policy.is_due(age):
                self.due.add(task)

    def _age_out(self, group: list) -> None:
        self.num_aged_out += 1
        self.data_source.mark_finished([group], "aged_out")
        self._check_getting_on()

    # ---- finished groups -------------------------------------------------------------------------------------------

    def _take(self, task: asyncio.Task) -> None:
        group = task.result()
        check_size(self.args, group)
        if any(leaf.metadata.get("generate_error") == PROMPT_TOO_LONG for leaf in leaves_of(group)):
            self._drop(task, group, PROMPT_TOO_LONG, "failed")
            return
        if any(leaf.status == Sample.Status.ABORTED for leaf in leaves_of(group)):
            self._retry(task, group)
            return
        self.all_groups.append(group)
        verdict = filter_group(self.args, group)
        candidates = self.state.remaining_batch_size  # passed, running, and those taken in this turn before this one
        insufficient = candidates <= self.target
        if not verdict.keep and not (verdict.keep_when_insufficient and insufficient):
            self._drop(task, group, verdict.reason, "filtered")
            return
        self.passed.append(group)
        if len(self.passed) <= self.target:
            self.state.progress.add("generate", 1)

    def _drop(self, task: asyncio.Task, group: list, reason: str | None, outcome: str) -> None:
        del self.origin[task]
        self.state.remaining_batch_size -= 1
        self.num_dropped += 1
        self.dropped.on_dynamic_filter_drop(reason)
        self.data_source.mark_finished(group, outcome)
        self._check_getting_on()

    def _retry(self, task: asyncio.Task, group: list) -> None:
        """A group aborted from outside while the round goes on (a paused engine) is continued."""
        del self.origin[task]
        self.state.remaining_batch_size -= 1
        self._give_back([group])
        self.num_dropped += 1
        self.dropped.on_dynamic_filter_drop("aborted")
        self._check_getting_on()

    def _check_getting_on(self) -> None:
        num_dropped = self.num_dropped + self.num_aged_out
        reasons = f"{self.dropped.collect()}, {self.num_aged_out} too old"
        check_getting_on(self.args, self.data_source, self.rollout_id, len(self.passed), num_dropped, reasons)

    # ---- end of the round ------------------------------------------------------------------------------------------

    async def _stop_rest(self) -> list[list]:
        """Abort what still runs; returns the groups to put back."""
        if not self.state.pendings:
            self.state.aborted = True
            return []
        await abort(self.args, self.rollout_id)
        return [self._leftover(task) for task in sorted(self.state.pendings, key=self._order)]

    def _leftover(self, task: asyncio.Task) -> list:
        """What a stopped task leaves; a group whose task failed or was cancelled starts again from its prompts."""
        if not task.cancelled() and task.exception() is None:
            return task.result()
        if not task.cancelled():
            logger.warning("a surplus group failed while the round ended: %r", task.exception())
        # A copy: a plain function that nobody can end may still write into its samples.
        group = duplicate_group(self.origin[task])
        for leaf in leaves_of(group):
            if leaf.status not in generation.FINISHED:
                leaf.reset_response()
        return group

    async def _cancel_all(self) -> None:
        """After an error: stop every task, free the engines, give the prompts back, be ready for the next round."""
        for task in self.origin:
            task.cancel()
        await asyncio.gather(*self.origin, return_exceptions=True)
        await abort_all(self.args)
        groups = sorted(self.origin.values(), key=first_index)  # with those that passed
        for leaf in leaves_of(groups):
            leaf.reset_response()
        self.data_source.add_samples(groups)
        self.state.reset()

    def _finish(self, leftovers: list[list]) -> RolloutFnTrainOutput:
        args, counts = self.args, counted(self.state)
        kept, surplus = self._choose()
        self.all_groups.sort(key=first_index)
        check_rewards(self.state, kept, self.rollout_id)
        surplus += [group for group in leftovers if is_finished(group)]
        leftovers = [group for group in leftovers if not is_finished(group)]
        self.state.reset()
        self._give_back(sorted(surplus + leftovers, key=first_index))
        metrics = self._metrics(kept, len(surplus), len(leftovers), counts)
        self.data_source.mark_delivered(kept, self.rollout_id)
        run_round_hooks(args, kept, self.all_groups, self.data_source)
        return RolloutFnTrainOutput(samples=kept, metrics=metrics)

    def _choose(self) -> tuple[list[list], list[list]]:
        """(the groups to train, sorted; finished ones beyond the target): oldest first, then by arrival."""
        if len(self.passed) < self.target:
            raise RuntimeError(
                f"round {self.rollout_id}: --round-policy-path {self.args.round_policy_path} ended the round with "
                f"{len(self.passed)} of {self.target} groups"
            )
        by_age = sorted(self.passed, key=lambda group: not self.policy.is_due(age_of(group, self.rollout_id)))
        return sorted(by_age[: self.target], key=first_index), by_age[self.target :]

    def _give_back(self, groups: list[list]) -> None:
        """Groups that are not trained in this round: to the buffer, as the policy wants them."""
        back = []
        for group in groups:
            fate = self.policy.leftover(age_of(group, self.rollout_id), is_finished(group))
            if fate == DROP:
                self._age_out(group)
            else:
                back.append(prepare_for_buffer(group, self.rollout_id, restart=fate == RESTART))
        self.data_source.add_samples(back)

    def _metrics(self, kept: list, num_surplus: int, num_aborted: int, counts: dict[str, int]) -> dict[str, Any]:
        metrics = self.dropped.collect() | counts
        numbers = {"surplus_groups": num_surplus, "aborted_groups": num_aborted, "aged_out_groups": self.num_aged_out}
        metrics |= {f"rollout/{name}": number for name, number in numbers.items() if number}
        continued = [group for group in kept if age_of(group, self.rollout_id)]
        if continued:
            metrics["rollout/continued_groups"] = len(continued)
            metrics["rollout/oldest_group"] = max(age_of(group, self.rollout_id) for group in continued)
        return metrics


async def abort(args, rollout_id: int) -> None:
    """Stop all unfinished samples of a training round and wait until their tasks have ended."""
    state = GenerateState(args)
    assert not state.aborted, "abort was called twice in one round"
    state.aborted = True
    for task in list(state.reward_tasks):
        task.cancel()
    await abort_all(args)
    for task in list(state.reward_tasks):
        task.cancel()
    if not state.pendings:
        return
    _, late = await asyncio.wait(state.pendings, timeout=ABORT_GRACE_S)
    if late:
        logger.warning(
            "round %d: %d groups did not stop %.0f s after the abort: cancelled", rollout_id, len(late), ABORT_GRACE_S
        )
    for task in late:
        task.cancel()
    await asyncio.gather(*state.pendings, return_exceptions=True)
