"""What the Data Buffer's process derives from prompts and flags."""

import asyncio
import random
import threading
from types import SimpleNamespace

import numpy
import pytest
import torch

from slime.config import checkpoint_dirs
from slime.ray.rollout_manager import (
    DEFAULT_ROLLOUT_FUNCTION,
    RolloutManager,
    untouched_random_numbers,
    untrained_groups,
)
from slime.utils.types import Sample


def info(num_rows: int, **changes) -> dict:
    args = SimpleNamespace(
        **(
            dict(
                num_rollout=None,
                num_epoch=2,
                rollout_batch_size=4,
                prompt_data="rows.jsonl",
                sglang_model_routers=None,
                resume_from=None,
                start_rollout_id=0,
            )
            | changes
        )
    )
    manager = RolloutManager(args, slots=None, host="127.0.0.1")
    manager._data_source = range(num_rows)
    return manager._info()


def test_fb_d11_epochs_decide_how_many_rounds_there_are_unless_rounds_are_given():
    assert info(10)["num_rollout"] == 5  # a batch may span two epochs
    assert info(10)["num_rollout_per_epoch"] == 2
    given = info(10, num_rollout=7)
    assert (given["num_rollout"], given["num_rollout_per_epoch"]) == (7, None)


@pytest.mark.parametrize(
    ("batch_size", "prompts", "start", "rounds"),
    [
        (4, 12, None, 5),  # the same batch size: as many as ever
        (2, 12, None, 3 + 4),
        (8, 12, None, 3 + 1),
        (8, 24, None, 3),  # the epochs are over: nothing is left
        (2, None, None, 10),  # written before this was recorded
        (2, 12, 4, 10),  # nobody knows the rounds before one that was chosen
    ],
)
def test_epochs_end_where_they_do_also_with_another_batch_size(monkeypatch, batch_size, prompts, start, rounds):
    found = checkpoint_dirs.Checkpoint("iter_0000002", 2, 0, "run", 1, None, "fp32", {}, prompts)
    monkeypatch.setattr(checkpoint_dirs, "latest", lambda folder: found)
    assert info(10, rollout_batch_size=batch_size, start_rollout_id=start)["num_rollout"] == rounds


def test_less_than_one_round_is_refused():
    with pytest.raises(ValueError, match="--num-epoch 1 over 3 prompts.*less than one round"):
        info(3, num_epoch=1)


def test_a_source_without_a_length_needs_a_number_of_rounds():
    with pytest.raises(ValueError, match="--num-epoch 2: the data source my.Source has no length.*give --num-rollout"):
        info(0, data_source_path="my.Source")


class Buffer:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        def tell(samples, *more):
            if samples:
                self.told.append((name, [group[0].group_index for group in samples], *more))

        return tell

    def stats(self):
        return {}


def group(index: int, *statuses, **fields) -> list[Sample]:
    return [Sample(group_index=index, status=status, **fields) for status in statuses]


def test_groups_that_whole_steps_leave_over_go_back_and_those_out_of_the_loss_are_no_training():
    """Round 3: group 1 did not fit into a step, every reward of group 2 failed, a filter removed 3, all of 4 is masked."""
    args = SimpleNamespace(n_samples_per_prompt=2, custom_convert_samples_to_train_data_path=None)
    manager = RolloutManager(args, slots=None, host="127.0.0.1")
    manager._data_source, metrics = Buffer(), {}
    done, failed, response = Sample.Status.COMPLETED, Sample.Status.FAILED, {"tokens": [1, 2], "response_length": 1}
    manager._trained_by[3] = [
        [*group(0, done, **response), *group(0, failed, remove_sample=True)],
        group(1, done, done, **response),
        group(2, failed, failed, remove_sample=True, **response),
        group(3, done, done, remove_sample=True, **response),
        group(4, done, done, loss_mask=[0], **response),
        group(5, failed, failed, **response),  # what failed in a tool may be trained all the same
    ]
    manager._keep_untrained(3, {1}, metrics)
    assert metrics == {"rollout/untrained_groups": 1}
    manager.mark_trained(3)
    assert manager._data_source.told == [
        ("mark_undelivered", [1]),
        ("add_samples", [1]),
        ("mark_finished", [0, 5], "trained"),
        ("mark_finished", [2], "failed"),
        ("mark_finished", [3, 4], "filtered"),
    ]


@pytest.mark.parametrize(
    "rows, positions, expected",
    [
        (None, [0, 1, 2, 3], ({2}, set())),  # row i is sample i
        ([5, 4, 0, 1, 2, 3], [0, 1, 2, 3], ({1}, set())),  # the other way round
        ([4, 4, 5, 0], [0, 1, 2], ({0}, {1})),  # a row twice, samples without one
        ([40, None], [0], (set(), set())),  # of no sample: nothing is known
    ],
)
def test_groups_that_are_not_trained_are_told_by_the_samples_that_rows_are_of(rows, positions, expected):
    samples = [Sample(group_index=i // 2, index=i) for i in range(6)]
    assert untrained_groups(samples, rows, positions) == expected


def test_a_prompt_of_which_a_conversion_makes_no_row_is_filtered():
    manager = RolloutManager(
        SimpleNamespace(custom_convert_samples_to_train_data_path="mine.convert"), None, "127.0.0.1"
    )
    manager._data_source = Buffer()
    manager._trained_by[0] = [group(i, Sample.Status.COMPLETED, tokens=[1, 2], response_length=1) for i in range(2)]
    manager._without_rows = {1}
    manager.mark_trained(0)
    assert manager._data_source.told == [("mark_finished", [0], "trained"), ("mark_finished", [1], "filtered")]


def test_a_flat_list_of_samples_ends_prompt_by_prompt():
    manager = RolloutManager(SimpleNamespace(custom_convert_samples_to_train_data_path=None), None, "127.0.0.1")
    manager._data_source = Buffer()
    failed = group(0, Sample.Status.FAILED, remove_sample=True)
    manager._trained_by[0] = [*failed, *group(0, Sample.Status.COMPLETED, tokens=[1, 2], response_length=1)]
    manager.mark_trained(0)
    assert manager._data_source.told == [("mark_finished", [0], "trained")]


def test_prompts_that_a_loop_of_ones_own_leaves_out_count_as_filtered(monkeypatch):
    done = Sample.Status.COMPLETED
    manager = RolloutManager(SimpleNamespace(rollout_batch_size=3), slots=None, host="127.0.0.1")
    manager._data_source = buffer = Buffer()
    handed = [group(i, done, done) for i in range(3)]
    buffer.get_samples = lambda count: handed[:count]
    monkeypatch.setattr(manager, "_batch", lambda *arguments: arguments)
    assert manager.prompts(5) == [sample for one in handed for sample in one]
    samples = [*handed[2], *handed[0]]
    assert manager.batch(5, samples, {"rewards": [1.0] * 4}, 2.0) == (5, samples, {}, 2.0, {"rewards": [1.0] * 4})
    assert buffer.told == [("mark_finished", [1], "filtered"), ("mark_delivered", [2, 0], 5)]
    assert manager._trained_by[5] == [handed[2], handed[0]]


def test_a_run_that_only_generates_holds_no_round_after_it_is_made(monkeypatch):
    args = SimpleNamespace(
        deterministic_mode=False, load_debug_rollout_data=None, save_debug_rollout_data=None, debug_rollout_only=True,
        custom_convert_samples_to_train_data_path=None,
    )  # fmt: skip
    manager = RolloutManager(args, slots=None, host="127.0.0.1")
    manager._data_source = buffer = Buffer()
    made = [group(7, Sample.Status.COMPLETED, tokens=[1, 2], response_length=1)]
    monkeypatch.setattr(manager, "_groups", lambda rollout_id: (made, {}))
    monkeypatch.setattr(manager, "_rollout_metrics", lambda *arguments: {})
    assert manager.generate(0) == ([], {})
    assert manager._trained_by == {}
    assert buffer.told == [("mark_delivered", [7], 0), ("mark_finished", [7], "trained")]


class Server:
    """Its engine dies when it is told to."""

    engine_urls = ["http://one"]

    def __init__(self):
        self.died = threading.Event()
        self.router = SimpleNamespace(check_alive=lambda: None)

    def dead_engines(self):
        return ["http://one: out of memory"] if self.died.is_set() else []


@pytest.mark.parametrize("ends_itself", [True, False], ids=["the function notices", "the function waits on"])
def test_an_engine_that_dies_under_a_rollout_function_ends_it(monkeypatch, ends_itself):
    """So whoever waits for the round hears of it, in every loop."""
    server, go_on = Server(), threading.Event()

    def generate(args, option, rollout_id, data_source, evaluation):
        server.died.set()
        if ends_itself:
            raise ConnectionError("no answer")
        go_on.wait(60)

    monkeypatch.setattr("slime.ray.rollout_manager.call_rollout_path", generate)
    monkeypatch.setattr("slime.ray.rollout_manager.ENGINE_CHECK_S", 0.01)
    manager = RolloutManager(SimpleNamespace(deterministic_mode=False, load_debug_rollout_data=None), None, "127.0.0.1")
    manager._server, manager._data_source = server, None
    with pytest.raises(RuntimeError, match="(?s)1 of 1 rollout engines died: http://one: out of memory"):
        manager.generate(0)
    go_on.set()


def test_a_rollout_function_finds_an_event_loop_as_in_a_main_thread(monkeypatch):
    async def one():
        return 1

    def generate(args, option, rollout_id, data_source, evaluation):
        return asyncio.get_event_loop().run_until_complete(one())

    monkeypatch.setattr("slime.ray.rollout_manager.call_rollout_path", generate)
    manager = RolloutManager(SimpleNamespace(), None, "127.0.0.1")
    manager._data_source = None
    assert [manager._call_rollout("rollout_function_path", 0, evaluation=False) for _ in range(2)] == [1, 1]


def test_evaluation_leaves_the_random_numbers_of_training_alone():
    def draw():
        return random.random(), numpy.random.random(), torch.rand(1).item()

    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    with pytest.raises(KeyError), untouched_random_numbers():
        draw()
        raise KeyError
    assert draw() == expected


def test_an_evaluation_set_that_cannot_be_read_ends_the_start(monkeypatch):
    def refuse(args):
        raise ValueError("evaluation set bad: line 2")

    monkeypatch.setattr("slime.rollout.hooks.check_rollout_hooks", lambda args: None)
    monkeypatch.setattr("slime.rollout.data_source.create_data_source", lambda args: None)
    monkeypatch.setattr("slime.rollout.eval_rollout.read_eval_sets", refuse)
    args = SimpleNamespace(
        rollout_function_path="mine.rollout", eval_function_path=DEFAULT_ROLLOUT_FUNCTION, eval_interval=1,
        sglang_model_routers=None,
    )  # fmt: skip
    manager = RolloutManager(args, slots=None, host="127.0.0.1")
    manager._server = object()
    with pytest.raises(ValueError, match="evaluation set bad"):
        manager._load_functions()
