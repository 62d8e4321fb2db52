"""Generation that never stops: groups are produced all the time, a round takes those that are ready.

Invariants: finished groups beyond a round's need stay queued for the next one; aborted groups go back to the data
source; an error of any group is raised by the next round; what is in flight or queued counts as not consumed in a
checkpoint. With --max-staleness S, groups are delivered in the order of admission, slow ones too, and admitted only as far
ahead as keeps each within S weight versions of the round that trains it; nothing is dropped for its age. Does not know
weight updates.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
from collections import deque
from typing import Any

from slime.rollout import generation
from slime.rollout.base_types import RolloutFnTrainOutput, leaves_of
from slime.rollout.data_source_adapter import as_data_source
from slime.rollout.filter_hub.base_types import MetricGatherer, filter_group
from slime.rollout.generate_state import GenerateState, num_engines
from slime.rollout.request import PROMPT_TOO_LONG
from slime.rollout.round_end import (
    check_getting_on,
    check_rewards,
    check_size,
    counted,
    first_index,
    is_aborted,
    out_of_prompts,
    prepare_for_buffer,
    run_round_hooks,
)
from slime.rollout.round_policy import DROP, RESTART, age_of
from slime.utils.async_utils import get_background_loop, run

logger = logging.getLogger(__name__)

POLL_S = 0.5
REPORT_S = 30.0
STOP_TIMEOUT_S = 5.0


class AsyncRolloutWorker:
    """Keeps up to `concurrency` groups in flight on the background loop, and a queue of finished ones."""

    def __init__(self, args, data_buffer, concurrency: int | None = None) -> None:
        self.args = args
        self.data_source = as_data_source(args, data_buffer)
        self.policy = GenerateState(args).policy_for(args)
        self.concurrency = concurrency or args.sglang_server_concurrency * num_engines(args)
        self.rollout_id = 0
        self.error: BaseException | None = None
        self.completed: deque[tuple[int, list]] = deque()
        self.in_flight: dict[asyncio.Task, tuple[int, list]] = {}
        self._admitted = 0
        self._taken = self._num_dropped = 0  # by the running round, or by the last one until the next begins
        self._stopping = False
        self._source_is_dry = False  # it gave nothing when it was asked last, and nothing came back to it since
        self._wake: asyncio.Event | None = None
        self._pump: asyncio.Task | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        run(self._start())

    async def _start(self) -> None:
        if self._pump is None or self._pump.done():
            self._wake = asyncio.Event()
            self._pump = asyncio.ensure_future(self._run())

    def is_running(self) -> bool:
        return self._pump is not None and not self._pump.done() and self.error is None

    def stop(self) -> None:
        """Cancel what is in flight and give all groups back; returns when that is done, after at most 5 s."""
        future = asyncio.run_coroutine_threadsafe(self._stop(), get_background_loop())
        future.result(timeout=STOP_TIMEOUT_S)

    async def _stop(self) -> None:
        self._stopping = True
        tasks = [*self.in_flight, *([self._pump] if self._pump else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.data_source.add_samples([group for _, group in self.completed])
        self.completed.clear()

    # ---- producing -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        state = GenerateState(self.args)
        state.reset()
        try:
            while self.error is None and not self._stopping:
                self._wake.clear()
                while self._may_admit():
                    groups = self.data_source.get_samples(1)
                    self._source_is_dry = not groups
                    if not groups:
                        break
                    for group in groups:  # a user's class may give more than it was asked for
                        self._admit(state, group)
                waiter = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait({waiter}, timeout=POLL_S)
                finally:
                    waiter.cancel()
        except Exception as error:
            self.error = error

    def _may_admit(self) -> bool:
        outstanding = len(self.in_flight) + len(self.completed)
        if len(self.in_flight) >= self.concurrency or len(self.completed) >= self.concurrency:
            return False
        return self.args.max_staleness is None or outstanding + self._taken < self._max_ahead()

    def _max_ahead(self) -> int:
        """Groups that may be taken or outstanding since a round began.

        The engines' weights lack at most the rounds that the loop generates ahead of training and those since the last
        sync; a group with n before it is trained n // rollout_batch_size rounds after the one that is being collected.
        """
        args = self.args
        rounds = args.max_staleness - args.rounds_ahead - (args.update_weights_interval - 1)
        return (rounds + 1) * args.rollout_batch_size

    def _admit(self, state: GenerateState, group: list) -> None:
        state.rollout_id = self.rollout_id
        call = generation.generate_and_rm_group(self.args, group, dict(state.sampling_params))
        task = asyncio.ensure_future(call)
        self.in_flight[task] = (self._admitted, group)
        self._admitted += 1
        task.add_done_callback(self.on_done)

    def on_done(self, task: asyncio.Task) -> None:
        """Queue a finished group, give an aborted one back, keep the first error. Never blocks."""
        order, origin = self.in_flight.pop(task)
        self._source_is_dry = False
        try:
            self._settle(task, order, origin)
        except Exception as error:  # of a user's data source or policy: asyncio would go on without the group
            self.error = self.error or error
        self._wake.set()

    def _settle(self, task: asyncio.Task, order: int, origin: list) -> None:
        if task.cancelled() or task.exception() is not None:
            if not task.cancelled():
                self.error = self.error or task.exception()
            for leaf in leaves_of(origin):
                leaf.reset_response()
            self.data_source.add_samples([origin])
        elif is_aborted(task.result()):
            self._give_back(task.result())
        else:
            self.completed.append((order, task.result()))

    def _give_back(self, group: list) -> None:
        fate = self.policy.leftover(age_of(group, self.rollout_id), finished=False)
        if fate == DROP:
            self.data_source.mark_finished([group], "aged_out")
        else:
            self.data_source.add_samples([prepare_for_buffer(group, self.rollout_id, restart=fate == RESTART)])

    # ---- consuming -------------------------------------------------------------------------------------------------

    def get_completed_groups(self, limit: int | None = None) -> list[tuple[int, list]]:
        """Up to `limit` finished groups (order of admission, group); the rest stays queued."""
        if self.args.max_staleness is None:
            count = len(self.completed) if limit is None else min(limit, len(self.completed))
            return [self.completed.popleft() for _ in range(count)]
        oldest = min((order for order, _ in self.in_flight.values()), default=self._admitted)
        ready = sorted((item for item in self.completed if item[0] < oldest), key=lambda item: item[0])[:limit]
        taken = {order for order, _ in ready}
        self.completed = deque(item for item in self.completed if item[0] not in taken)
        return ready

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The next --rollout-batch-size groups that pass the filter."""
        args, target = self.args, self.args.rollout_batch_size
        self.rollout_id, self._taken, self._num_dropped = rollout_id, 0, 0
        state, drops = GenerateState(args), MetricGatherer()
        state.progress.set_total("generate", target)
        kept: list[list] = []
        all_groups: list[list] = []
        reported = time.monotonic()
        while len(kept) < target:
            if self.error is not None:
                raise self.error
            if self._source_is_dry and not self.in_flight and not self.completed:
                raise out_of_prompts(rollout_id, len(kept), target)
            for _, group in self.get_completed_groups(target - len(kept)):
                self._sort_in(group, kept, all_groups, drops)
            self._wake.set()
            if len(kept) < target:
                await asyncio.sleep(0.01)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                logger.info(
                    "round %d: %d of %d groups, %d in flight", rollout_id, len(kept), target, len(self.in_flight)
                )
        kept.sort(key=first_index)
        check_rewards(state, kept, rollout_id)
        self.data_source.mark_delivered(kept, rollout_id)
        run_round_hooks(args, kept, sorted(all_groups, key=first_index), self.data_source)
        return RolloutFnTrainOutput(samples=kept, metrics=drops.collect() | self._metrics(state))

    def _sort_in(self, group: list, kept: list, all_groups: list, drops: MetricGatherer) -> None:
        check_size(self.args, group)
        if any(leaf.metadata.get("generate_error") == PROMPT_TOO_LONG for leaf in leaves_of(group)):
            self._drop(group, drops, PROMPT_TOO_LONG, "failed")
            return
        all_groups.append(group)
        verdict = filter_group(self.args, group)
        if verdict.keep:
            kept.append(group)
            self._taken += 1
            GenerateState(self.args).progress.add("generate", 1)
        else:
            self._drop(group, drops, verdict.reason, "filtered")

    def _drop(self, group: list, drops: MetricGatherer, reason: str | None, outcome: str) -> None:
        drops.on_dynamic_filter_drop(reason)
        self.data_source.mark_finished(group, outcome)
        self._num_dropped += 1
        reasons = str(drops.collect())
        check_getting_on(self.args, self.data_source, self.rollout_id, self._taken, self._num_dropped, reasons)

    def _metrics(self, state: GenerateState) -> dict[str, Any]:
        counts = counted(state)
        state.counters.clear()
        state.first_failure = None
        return counts | {
            "rollout/queued_groups": len(self.completed),
            "rollout/in_flight_groups": len(self.in_flight),
        }


_worker: AsyncRolloutWorker | None = None


def get_global_worker(args, data_buffer) -> AsyncRolloutWorker:
    """The worker of this process, started on first use, and again for other args or when it has ended."""
    global _worker
    if _worker is None or _worker.args is not args or not _worker.is_running():
        if _worker is None:
            atexit.register(stop_global_worker)
        stop_global_worker()
        _worker = AsyncRolloutWorker(args, data_buffer)
        _worker.start()
    return _worker


def stop_global_worker() -> None:
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        worker.stop()


def generate_rollout_fully_async(args, rollout_id, data_buffer, evaluation=False) -> RolloutFnTrainOutput:
    """`--rollout-function-path` of the fully asynchronous loop."""
    if evaluation:
        raise ValueError(
            "the fully asynchronous rollout does not evaluate; give --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout"
        )
    return run(get_global_worker(args, data_buffer).collect(rollout_id))


generate_rollout = generate_rollout_fully_async
