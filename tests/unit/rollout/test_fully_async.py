import contextlib
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import stub_rm  # noqa: F401
from fake_engine import reply

from slime.rollout import fully_async_rollout
from slime.rollout.data_source import create_data_source
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.utils.async_utils import run
from slime.utils.http_utils import HTTPStatusError
from slime.utils.types import Sample


@pytest.fixture
def async_args(engine, make_args):
    def make(**overrides):
        return make_args(engine, max_staleness=None, **overrides)

    yield make
    fully_async_rollout.stop_global_worker()


def indices(output):
    return [[s.index for s in group] for group in output.samples]


def finished_group(group_index):
    return [
        Sample(group_index=group_index, index=2 * group_index + i, reward=1.0, status=Sample.Status.COMPLETED)
        for i in (0, 1)
    ]


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.01)


def test_fb_a01_finished_groups_beyond_the_target_wait_for_the_next_round(async_args):
    args = async_args(rollout_batch_size=4)
    worker = AsyncRolloutWorker(args, create_data_source(args), concurrency=1)
    worker.completed.extend((i, finished_group(i)) for i in range(10))
    assert worker.get_completed_groups(0) == []

    async def collect():
        import asyncio

        worker._wake = asyncio.Event()
        return await worker.collect(0)

    assert [group[0].group_index for group in run(collect()).samples] == [0, 1, 2, 3]
    assert [group[0].group_index for _, group in worker.completed] == [4, 5, 6, 7, 8, 9]
    assert [group[0].group_index for group in run(collect()).samples] == [4, 5, 6, 7]


def test_rounds_take_each_prompt_once_while_generation_runs_ahead(engine, async_args):
    args = async_args(sglang_server_concurrency=3)
    source = create_data_source(args)
    seen = []
    for rollout_id in range(4):
        seen += indices(generate_rollout_fully_async(args, rollout_id, source))
    assert len(seen) == 8 and len({tuple(group) for group in seen}) == 8
    worker = fully_async_rollout._worker
    wait_until(lambda: len(worker.completed) >= 3)
    assert len(worker.completed) + len(worker.in_flight) <= 6


def test_queue_and_flight_count_as_not_consumed(engine, async_args):
    args = async_args(sglang_server_concurrency=3, rollout_batch_size=1)
    source = create_data_source(args)
    kept = generate_rollout_fully_async(args, 0, source).samples
    source.mark_finished(kept)
    state = source.state_dict()
    resumed = create_data_source(args)
    resumed.load_state_dict(state)
    served = {group[0].data_row for group in resumed.get_samples(9)}
    assert served == set(range(10)) - {kept[0][0].data_row}


def test_fb_t08_an_aborted_group_restarts_from_its_prompt_without_partial_rollout(engine, async_args):
    versions = iter(["2", "2", "4", "4"])
    finish = iter(["abort", "stop", "stop", "stop"])
    engine.answer = lambda payload: reply([5, 6], "x", next(finish, "stop"), next(versions, "4"))
    args = async_args(sglang_server_concurrency=1, rollout_batch_size=1)
    sample = generate_rollout_fully_async(args, 0, create_data_source(args)).samples[0]
    for one in sample:
        assert one.response_length == 2 and len(set(one.token_weight_versions)) == 1
    assert all(len(request["input_ids"]) == 2 for request in engine.requests)


def test_partial_rollout_continues_an_aborted_group(engine, async_args):
    finish = iter(["abort", "abort", "stop", "stop"])
    engine.answer = lambda payload: reply([5, 6], "x", next(finish, "stop"))
    args = async_args(sglang_server_concurrency=1, rollout_batch_size=1, partial_rollout=True)
    group = generate_rollout_fully_async(args, 0, create_data_source(args)).samples[0]
    assert [s.response_length for s in group] == [4, 4]


def test_an_error_is_raised_by_the_round_and_the_next_one_starts_again(engine, async_args):
    engine.answer = lambda payload: 500
    args = async_args()
    source = create_data_source(args)
    with pytest.raises(HTTPStatusError):
        generate_rollout_fully_async(args, 0, source)
    engine.answer = lambda payload: reply([7])
    assert len(generate_rollout_fully_async(args, 0, source).samples) == 2


def test_filter_and_hooks_apply(engine, async_args):
    stub_rm.seen["all"].clear()
    args = async_args(
        dynamic_sampling_filter_path="stub_rm.keep_odd_groups",
        rollout_all_samples_process_path="stub_rm.remember_all",
        sglang_server_concurrency=1,
    )
    output = generate_rollout_fully_async(args, 0, create_data_source(args))
    assert [group[0].group_index for group in output.samples] == [1, 3]
    assert [group[0].group_index for group in stub_rm.seen["all"][0][0]] == [0, 1, 2, 3]


def test_max_staleness_keeps_the_order_and_admits_nothing_while_a_round_trains(engine, async_args):
    def answer(payload):
        return 0.2 if payload["input_ids"][1] == 24 else reply([7])  # prompt p0 is slow

    engine.answer = answer
    args = async_args(rollout_batch_size=2)
    args.max_staleness = 1
    source = create_data_source(args)
    assert indices(generate_rollout_fully_async(args, 0, source)) == [[0, 1], [2, 3]]
    worker = fully_async_rollout._worker
    wait_until(lambda: len(worker.completed) == 2)
    time.sleep(0.05)
    assert len(worker.completed) + len(worker.in_flight) == 2  # what a round may be old: they are of the next one


def test_fb_a06_as_much_is_admitted_after_a_recovery_as_at_the_start(engine, async_args):
    engine.answer = lambda payload: "hang"
    args = async_args(rollout_batch_size=4)
    args.max_staleness = 2
    worker = AsyncRolloutWorker(args, create_data_source(args))
    worker.rollout_id = 50
    worker.start()
    wait_until(lambda: len(worker.in_flight) >= 12)
    time.sleep(0.05)
    assert len(worker.in_flight) == 12
    worker.stop()


@pytest.mark.parametrize("rounds_ahead", [0, 1])
def test_fb_a08_slow_prompts_are_trained_as_often_as_fast_ones_and_none_too_old(engine, async_args, rounds_ahead):
    """Half of the prompts take five times as long; the loops of train.py and train_async.py with a bound of two."""
    weights = {"version": 0}

    def answer(payload):
        is_slow = payload["input_ids"][1] % 2 == 0
        return reply([7], version=str(weights["version"])) | {"after_s": 0.05 if is_slow else 0.01}

    engine.answer = answer
    args = async_args(rounds_ahead=rounds_ahead, n_samples_per_prompt=1)
    args.max_staleness = 2
    source = create_data_source(args)
    ages, num_slow = [], 0
    rounds, ahead = deque(range(10)), deque()
    with ThreadPoolExecutor(1) as pool:
        while rounds or ahead:
            while rounds and len(ahead) <= rounds_ahead:
                ahead.append((rounds[0], pool.submit(generate_rollout_fully_async, args, rounds.popleft(), source)))
            rollout_id, generation = ahead.popleft()
            samples = [sample for group in generation.result(60).samples for sample in group]
            ages += [rollout_id - int(sample.weight_versions[0]) for sample in samples]
            num_slow += sum(sample.tokens[1] % 2 == 0 for sample in samples)
            time.sleep(0.03)  # training
            for _, generation in ahead:
                generation.result(60)
            weights["version"] = rollout_id + 1
    assert len(ages) == 20 and num_slow == 10
    assert max(ages) <= 2
    assert source.stats()["aged_out"] == 0


def test_evaluation_needs_another_function(async_args):
    with pytest.raises(ValueError, match="--eval-function-path"):
        generate_rollout_fully_async(async_args(), 0, None, evaluation=True)


def test_a_filter_that_drops_everything_and_a_source_without_prompts_end_the_round(engine, async_args):
    engine.answer = lambda payload: reply([7])
    args = async_args(dynamic_sampling_filter_path="stub_rm.drop_all")
    with pytest.raises(RuntimeError, match="round 0: 40 groups in a row were dropped and none kept.*drop_never': 40"):
        generate_rollout_fully_async(args, 0, create_data_source(args))

    class Few:
        left = 3

        def get_samples(self, num_samples):
            self.left -= 1
            return [Sample(prompt="a")] if self.left >= 0 else []

    source, args = Few(), async_args()
    assert len(generate_rollout_fully_async(args, 0, source).samples) == 2
    with pytest.raises(RuntimeError, match="round 1: the data source has no more prompts after 1 of 2 groups"):
        generate_rollout_fully_async(args, 1, source)


def test_a_source_that_gives_more_than_it_was_asked_for_loses_nothing(engine, async_args):
    class Three:
        drawn = 0

        def get_samples(self, num_samples):
            self.drawn += 3
            return [Sample(prompt=f"q{self.drawn - 3 + i}") for i in range(3)]

    engine.answer = lambda payload: reply([7])
    source, args = Three(), async_args(sglang_server_concurrency=2)
    outputs = [generate_rollout_fully_async(args, rollout_id, source) for rollout_id in range(3)]
    worker = fully_async_rollout._worker
    wait_until(lambda: len(worker.completed) >= 2 and not worker.in_flight)  # enough is ready: no more is drawn
    groups = [group for output in outputs for group in output.samples] + [group for _, group in worker.completed]
    assert sorted(group[0].prompt for group in groups) == sorted(f"q{i}" for i in range(source.drawn))


def test_what_a_source_raises_when_a_group_comes_back_ends_the_round(engine, async_args):
    class Full:
        def get_samples(self, num_samples):
            return [[Sample(prompt="a"), Sample(prompt="a")] for _ in range(num_samples)]

        def add_samples(self, groups):
            raise OSError("the store is full")

    engine.answer = lambda payload: reply([7], finish="abort")
    with pytest.raises(OSError, match="the store is full"):
        generate_rollout_fully_async(async_args(), 0, Full())
    with contextlib.suppress(OSError):  # it cannot give its groups back either
        fully_async_rollout.stop_global_worker()


def test_groups_of_another_size_are_named(engine, async_args):
    class Singles:
        def get_samples(self, num_samples):
            return [[Sample(prompt="a")] for _ in range(num_samples)]

    engine.answer = lambda payload: reply([7])
    with pytest.raises(ValueError, match="gave a group of 1 samples, --n-samples-per-prompt is 2"):
        generate_rollout_fully_async(async_args(), 0, Singles())


def test_what_is_counted_in_a_round_is_among_its_metrics_once(engine, async_args):
    args = async_args(custom_generate_function_path="agent_hooks.text_only", sglang_server_concurrency=1)
    source, counts = create_data_source(args), []
    for rollout_id in range(2):
        counts.append(generate_rollout_fully_async(args, rollout_id, source).metrics["rollout/text_only_samples"])
    assert counts[0] >= 4 and sum(counts) <= 2 * fully_async_rollout._worker._admitted
