import asyncio
import copy
import json
import random
import re
import threading
from collections import Counter

import pytest
import torch

from slime.rollout import ledger_command
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, create_data_source, pop_first
from slime.rollout.data_source_adapter import as_data_source
from slime.rollout.ledger_check import check
from slime.utils.async_utils import get_background_loop
from slime.utils.types import Sample


@pytest.fixture
def args(make_args, write_rows, tmp_path):
    def make(rows=10, **overrides):
        path = write_rows([{"input": f"p{i}"} for i in range(rows)])
        return make_args(prompt_data=path, save=str(tmp_path), load=str(tmp_path), **overrides)

    return make


def texts(groups):
    return [group[0].prompt for group in groups]


def order(rows, seed):
    indices = list(range(rows))
    random.Random(seed).shuffle(indices)
    return [f"p{i}" for i in indices]


def through_file(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


def test_groups_are_numbered_and_independent(args):
    source = RolloutDataSource(args(n_samples_per_prompt=3))
    first, second = source.get_samples(2)
    assert [s.index for s in first + second] == list(range(6))
    assert [s.group_index for s in first + second] == [0, 0, 0, 1, 1, 1]
    first[0].metadata["x"] = 1
    assert first[1].metadata == {}


def test_fb_d04_more_prompts_than_rows_are_served_over_several_epochs(args):
    source = RolloutDataSource(args(rows=3, rollout_shuffle=True))
    found = texts(source.get_samples(8))
    assert len(found) == 8 and source.epoch_id == 2 and source.sample_offset == 2
    assert found[:3] == order(3, 42) and found[3:6] == order(3, 43)
    assert sorted(found[:3]) == sorted(found[3:6]) == ["p0", "p1", "p2"]


def test_shuffle_has_its_own_generator(args):
    random.seed(1)
    expected = random.Random(1).random()
    RolloutDataSource(args(rollout_shuffle=True)).get_samples(25)
    assert random.random() == expected


def test_without_a_data_set_groups_are_blank(args):
    source = RolloutDataSource(args(rollout_global_dataset=False))
    assert [s.prompt for s in source.get_samples(1)[0]] == ["", ""] and len(source) == 0


def test_save_and_load_in_the_documented_file(args, tmp_path):
    arguments = args(rollout_shuffle=True)
    source = create_data_source(arguments)
    source.mark_delivered(source.get_samples(4), 0)
    source.save(0)
    state = torch.load(tmp_path / "rollout" / "global_dataset_state_dict_0.pt", weights_only=True)
    assert {k: state[k] for k in ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")} == {
        "sample_offset": 4,
        "epoch_id": 0,
        "sample_group_index": 4,
        "sample_index": 8,
        "metadata": {},
    }
    resumed = create_data_source(arguments)
    resumed.load(0)
    assert texts(resumed.get_samples(8)) == texts(source.get_samples(8))
    fresh = create_data_source(arguments)
    fresh.load(7)
    assert texts(fresh.get_samples(1)) == order(10, 42)[:1]


def test_fb_a03_resume_at_an_epoch_edge_continues_with_the_next_epoch(args, tmp_path):
    arguments = args(rows=4, rollout_shuffle=True)
    uninterrupted = RolloutDataSource(arguments)
    expected = [texts(uninterrupted.get_samples(1)) for _ in range(8)]
    source = RolloutDataSource(arguments)
    for _ in range(4):
        source.mark_finished(source.get_samples(1))
    resumed = RolloutDataSource(arguments)
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    assert [texts(resumed.get_samples(1)) for _ in range(4)] == expected[4:]


def test_fb_a02_over_sampled_prompts_survive_a_restart(args, tmp_path):
    arguments = args(rows=8, n_samples_per_prompt=1)
    trained = Counter()

    def one_round(source, rollout_id):
        groups = source.get_samples(4)
        source.mark_delivered(groups[:2], rollout_id)
        trained.update(texts(groups[:2]))
        source.add_samples(groups[2:3])  # one came back, one is still in flight
        return groups

    source = RolloutDataSourceWithBuffer(arguments)
    one_round(source, 0)
    source.save(0)
    for rollout_id in range(1, 4):
        source = RolloutDataSourceWithBuffer(arguments)  # killed and started again each round
        source.load(rollout_id - 1)
        one_round(source, rollout_id)
        source.save(rollout_id)
    assert trained == Counter({f"p{i}": 1 for i in range(8)})


def test_groups_in_flight_count_as_not_consumed(args, tmp_path):
    arguments = args()
    source = RolloutDataSourceWithBuffer(arguments)
    groups = source.get_samples(3)
    source.mark_finished(groups[1:2])
    groups[0][0].prompt = "edited by a hook"
    resumed = RolloutDataSourceWithBuffer(arguments)
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    found = resumed.get_samples(3)
    assert texts(found) == ["p0", "p2", "p3"]
    assert [s.index for s in found[0] + found[1]] == [0, 1, 4, 5]
    assert resumed.stats()["trained"] == 1 and resumed.stats()["in_flight"] == 3


def test_a_checkpoint_before_training_serves_delivered_groups_again(args, tmp_path):
    arguments = args()
    source = RolloutDataSourceWithBuffer(arguments)
    source.mark_delivered(source.get_samples(2), rollout_id=0)
    source.mark_delivered(source.get_samples(2), rollout_id=1)  # generated ahead, not trained yet
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(arguments)
    resumed.load(0)
    assert texts(resumed.get_samples(3)) == ["p2", "p3", "p4"]


def test_partial_samples_in_the_buffer_survive_with_their_tokens(args, tmp_path):
    arguments = args(partial_rollout=True)
    source = RolloutDataSourceWithBuffer(arguments)
    group = source.get_samples(1)[0]
    group[0].tokens = [1, 2]
    group[0].append_response_tokens(
        arguments, tokens=[3], log_probs=[-1.0], meta_info={"finish_reason": {"type": "abort"}}
    )
    group[0].trace = {"events": [(1, 2)]}
    source.add_samples([group])
    resumed = RolloutDataSourceWithBuffer(arguments)
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    found = resumed.get_samples(1)[0]
    assert found[0].tokens == [1, 2, 3] and found[0].status == Sample.Status.ABORTED and found[0].index == 0
    assert found[1].status == Sample.Status.PENDING


def test_finished_group_in_flight_is_handed_out_again_with_what_was_generated(args, tmp_path):
    source = RolloutDataSourceWithBuffer(args())
    first, second = source.get_samples(1)[0]
    finish(first, [3, 4]), finish(second, [5])
    source.add_samples([[[first, copy.deepcopy(first)], second]])  # finished surplus whose first sample fanned out
    source.get_samples(1)
    resumed = RolloutDataSourceWithBuffer(args())
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    (parts, other), fresh = resumed.get_samples(2)
    assert [s.index for s in (*parts, other)] == [0, 0, 1] and parts[1].tokens == [1, 3, 4]
    assert other.rollout_log_probs == [-1.0] and other.status == Sample.Status.COMPLETED
    assert fresh[0].status == Sample.Status.PENDING and fresh[0].index == 2


def test_groups_kept_for_reuse_are_new_groups_and_no_prompts_of_the_epoch(args, tmp_path):
    """Pushed while they are delivered, after they were trained, or before the round says that it trains them."""
    source = RolloutDataSourceWithBuffer(args())
    during, after, before = groups = source.get_samples(3)
    for sample in sum(groups, []):
        finish(sample, [3])
        sample.rollout_id = 7
    source.mark_delivered([during, after], 0)
    source.add_samples([during, before])
    source.mark_delivered([before], 0)
    source.mark_finished(groups)
    source.add_samples([after])
    resumed = RolloutDataSourceWithBuffer(args())
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    found = resumed.get_samples(3)
    assert [group[0].group_index for group in found] == [3, 4, 5] and during[0].group_index == 0
    assert [s.index for group in found for s in group] == list(range(6, 12))
    assert len({s.rollout_id for group in found for s in group}) == 3  # parts of one execution stay together
    assert all(group[0].metadata["start_rollout_id"] == 0 for group in found)  # so that they age
    again = found[0][0]
    assert (again.tokens, again.rollout_log_probs, again.token_weight_versions) == ([1, 3], [-1.0], ["4"])
    assert again.metadata == {"reused_group": 0, "start_rollout_id": 0} and during[0].metadata == {}
    resumed.mark_finished(found)
    stats = resumed.stats()
    assert (stats["trained"], stats["reused"], stats["in_flight"], stats["buffered"]) == (3, 3, 0, 0)
    assert check(resumed.state_dict()).problems == []


def finish(sample, ids):
    sample.tokens = [1]
    meta_info = {"finish_reason": {"type": "stop"}, "weight_version": "4"}
    sample.append_response_tokens(tokens=ids, log_probs=[-1.0] * len(ids), meta_info=meta_info)


def test_what_a_buffer_filter_throws_away_aged_out(args, tmp_path):
    (tmp_path / "young.py").write_text(
        "def buffer_filter(args, rollout_id, buffer, num_samples):\n"
        "    del buffer[0]\n    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]\n"
    )
    source = RolloutDataSourceWithBuffer(args(buffer_filter_path=str(tmp_path / "young.py")))
    source.add_samples(source.get_samples(3))
    assert texts(source.get_samples(2)) == ["p2", "p1"]
    assert source.stats()["aged_out"] == 1 and check(source.state_dict()).problems == []


def break_state(state, how):
    ledger = state["ledger"]
    if how == "lost":
        del ledger["in_flight"][1]
    elif how == "twice":
        ledger["waiting"][9] = {"epoch": 0, "row": 0, "reuse": False}
    elif how == "early":
        state["sample_offset"] -= 1
    elif how == "buffer":
        state["buffer"].clear()
    elif how == "count":
        ledger["outcomes"]["trained"] += 1
    elif how == "loose":
        ledger["num_loose"] += 1


@pytest.mark.parametrize(
    "how, message",
    [
        ("lost", "epoch 0 row 1: handed out, then lost"),
        ("twice", "epoch 0 row 0: trained and waiting at once"),
        ("early", "epoch 0 row 2: waiting, but the position says it is still to come"),
        ("buffer", r"group 2 \(epoch 0 row 2\) should wait in the buffer and is not there"),
        ("count", "outcomes are counted as"),
        ("loose", "1 prompts without a row were handed out, 0 ended or are open"),
    ],
)
def test_a_ledger_that_does_not_add_up_names_the_prompt(args, tmp_path, capsys, how, message):
    source = RolloutDataSourceWithBuffer(args())
    groups = source.get_samples(3)
    source.mark_finished(groups[:1])
    source.add_samples(groups[2:])
    torch.save(source.state_dict(), tmp_path / "good.pt")
    assert ledger_command.run(str(tmp_path / "good.pt")) == 0
    assert "every prompt handed out ended once or is open once" in capsys.readouterr().out
    state = source.state_dict()
    break_state(state, how)
    torch.save(state, tmp_path / "bad.pt")
    assert ledger_command.run(str(tmp_path / "bad.pt"), as_json=True) == 1
    assert any(re.search(message, problem) for problem in json.loads(capsys.readouterr().out)["problems"])


def test_ends_that_contradict_each_other_are_reported(args):
    source = RolloutDataSourceWithBuffer(args())
    groups = source.get_samples(2)
    source.mark_finished(groups[:1])
    source.mark_finished(groups[:1], "filtered")
    source.mark_finished(groups[1:])
    source.mark_delivered(groups[1:], 4)
    problems = check(source.state_dict()).problems
    assert problems == ["group 0 ended as trained, then as filtered", "group 1 delivered to round 4 after it ended"]


def test_a_changed_seed_waits_for_the_next_epoch(args, tmp_path, caplog):
    source = RolloutDataSource(args(rows=6, rollout_shuffle=True))
    begun = texts(source.get_samples(2))
    source.mark_finished(source.get_samples(0))
    resumed = RolloutDataSource(args(rows=6, rollout_shuffle=True, rollout_seed=7))
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    assert texts(resumed.get_samples(6)) == begun + order(6, 42)[2:] and "keeps its order" in caplog.text
    assert texts(resumed.get_samples(6)) == order(6, 8)


def test_state_is_whole_whenever_it_is_taken(args, tmp_path):
    """Whatever happens between two calls, each prompt of the epoch is settled, buffered, in flight or still to come."""
    rows, chance = 12, random.Random(3)
    arguments = args(rows=rows, n_samples_per_prompt=1, rollout_shuffle=True)
    source, held = RolloutDataSourceWithBuffer(arguments), []

    def act(source):
        choice = chance.choice(["take", "trained", "filtered", "back", "failed", "restart"])
        if choice == "take" and len(held) < 6:
            held.extend(source.get_samples(chance.randint(1, 3)))
        elif choice == "restart":
            resumed = RolloutDataSourceWithBuffer(arguments)
            resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
            held.clear()
            return resumed
        elif held:
            group = held.pop(chance.randrange(len(held)))
            if choice == "back":
                source.add_samples([group])
            elif choice != "take":
                source.mark_finished([group], choice)
        return source

    for _ in range(400):
        source = act(source)
        settled = {row: sum(counts.values()) for row, counts in source.ledger.per_row().items()}
        open_groups = len(source.buffer) + len(source._requeued) + len(source.ledger.in_flight)
        handed_out = source.epoch_id * rows + source.sample_offset
        assert sum(settled.values()) + open_groups == handed_out == source.sample_group_index
        assert max(settled.values(), default=0) <= source.epoch_id + 1
        assert check(source.state_dict()).problems == []


def test_another_data_set_is_refused_on_resume(args):
    state = RolloutDataSource(args(rows=4)).state_dict()
    with pytest.raises(ValueError, match="written with 4 prompts.*now gives 5"):
        RolloutDataSource(args(rows=5)).load_state_dict(state)


def test_ledger_counts_each_prompt_once(args):
    source = RolloutDataSourceWithBuffer(args(rows=4))
    groups = source.get_samples(4)
    for group, outcome in zip(groups, ("trained", "filtered", "aged_out", "failed"), strict=True):
        source.mark_finished([group], outcome)
        source.mark_finished([group], "trained")
    stats = source.stats()
    assert [stats[name] for name in ("trained", "filtered", "aged_out", "failed", "in_flight")] == [1, 1, 1, 1, 0]
    ends = source.ledger.per_row()
    assert ends == {0: {"trained": 1}, 1: {"filtered": 1}, 2: {"aged_out": 1}, 3: {"failed": 1}}


def test_buffer_is_first_in_first_out_before_new_prompts(args):
    source = RolloutDataSourceWithBuffer(args())
    groups = source.get_samples(3)
    source.add_samples([])
    source.add_samples(groups[1:])
    assert source.get_buffer_length() == 2
    assert texts(source.get_samples(3)) == ["p1", "p2", "p3"]


def test_pop_first_removes_what_it_returns():
    buffer = [[1], [2], [3]]
    assert pop_first(None, None, buffer, 2) == [[1], [2]] and buffer == [[3]]


def test_buffer_checks_the_shape_of_groups(args):
    source = RolloutDataSourceWithBuffer(args())
    with pytest.raises(AssertionError, match="a group of 1 samples, --n-samples-per-prompt is 2"):
        source.add_samples([[Sample()]])
    with pytest.raises(AssertionError, match="a Sample in it"):
        source.add_samples([Sample()])


def test_pushed_samples_are_numbered(args, tmp_path):
    source = RolloutDataSourceWithBuffer(args(rollout_global_dataset=False))
    source.add_samples([[Sample(prompt="a"), Sample(prompt="a")]])
    group = source.get_samples(1)[0]
    assert [s.index for s in group] == [0, 1] and group[0].group_index == 0
    resumed = RolloutDataSourceWithBuffer(args(rollout_global_dataset=False))
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    assert texts(resumed.get_samples(1)) == ["a"]


def test_plain_source_drops_what_comes_back(args):
    source = RolloutDataSource(args())
    source.add_samples(source.get_samples(1))
    assert source.stats()["aged_out"] == 1 and source.stats()["in_flight"] == 0


def test_buffer_filter_of_both_forms(args, tmp_path, monkeypatch):
    (tmp_path / "newest.py").write_text(
        "def buffer_filter(args, rollout_id, buffer, num_samples):\n"
        "    assert rollout_id is None\n    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]\n"
    )
    source = RolloutDataSourceWithBuffer(args(buffer_filter_path=str(tmp_path / "newest.py")))
    source.add_samples(source.get_samples(2))
    assert texts(source.get_samples(2)) == ["p1", "p0"]

    class Newest(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args, buffer, num_samples):
            return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]

    source = Newest(args())
    source.add_samples(source.get_samples(2))
    assert texts(source.get_samples(2)) == ["p1", "p0"]


class Untouched(list):
    """A group that nobody may look into."""

    def __iter__(self):
        raise AssertionError("looked at")


def test_taking_a_group_looks_at_no_other_of_the_buffer(args):
    source = RolloutDataSourceWithBuffer(args())
    source.add_samples(source.get_samples(1))
    source.buffer += [Untouched(group) for group in source.buffer * 3]
    assert texts(source.get_samples(1)) == ["p0"] and len(source.buffer) == 3


class OneThread:
    """A user's class that is not made for several threads."""

    def __init__(self):
        self.log = []

    def get_samples(self, num_samples):
        self.log.append("is asked")
        return [Sample(prompt="a") for _ in range(num_samples)]

    def mark_finished(self, samples, outcome):
        self.log.append("is told")
        self.other = threading.Thread(target=self.adapter.get_samples, args=[1])
        self.other.start()
        self.other.join(0.1)  # it has to wait
        self.log.append("has heard")


def test_a_users_class_is_called_by_one_thread_at_a_time(args):
    source = OneThread()
    source.adapter = as_data_source(args(), source)
    source.adapter.mark_finished([])
    source.other.join(60)
    assert source.log == ["is told", "has heard", "is asked"]


class Awaiting:
    """Its state is asked for by a checkpoint while a round of the background loop asks for samples."""

    def __init__(self):
        self.is_saved, self.is_asked = threading.Event(), threading.Event()

    async def get_samples(self, num_samples):
        return ["prompt"] * num_samples

    async def state_dict(self):
        self.is_saved.set()
        await asyncio.to_thread(self.is_asked.wait, 60)
        await asyncio.sleep(0.1)  # the round waits for its turn now
        return {"position": 1}


def test_async_methods_of_a_users_class_do_not_run_where_a_round_waits_for_its_turn(args):
    source, state = Awaiting(), {}
    adapter = as_data_source(args(), source)
    saving = threading.Thread(target=lambda: state.update(adapter.state_dict()), daemon=True)

    async def one_round():
        saving.start()
        await asyncio.to_thread(source.is_saved.wait, 60)
        source.is_asked.set()
        return adapter.get_samples(1)

    asyncio.run_coroutine_threadsafe(one_round(), get_background_loop()).result(60)
    saving.join(60)
    assert state["source"] == {"position": 1}


SEED_CLASS = """
from slime.utils.types import Sample
class MyBuffer:
    def __init__(self{args}):
        self.buffer, self.next = [], 0
    def get_samples(self, num_samples):
        if self.buffer:
            return self.buffer.pop(0)
        self.next += num_samples
        return [Sample(prompt=f"q{{self.next + i}}") for i in range(num_samples)]
    def add_samples(self, samples):
        self.buffer.extend(samples)
"""


@pytest.mark.parametrize("parameters", ["", ", args"])
def test_user_class_of_the_seed_form(args, tmp_path, parameters):
    file = tmp_path / f"mine{len(parameters)}.py"
    file.write_text(SEED_CLASS.format(args=parameters))
    source = create_data_source(args(data_source_path=str(file)))
    groups = source.get_samples(2)
    assert texts(groups) == ["q2", "q3"] and [len(group) for group in groups] == [2, 2]
    assert [s.index for group in groups for s in group] == [0, 1, 2, 3]
    assert len(source) == 0
    source.save(0), source.load(0), source.mark_finished(groups)
    again = copy.deepcopy(source.state_dict())
    source.load_state_dict(again)
    source.add_samples([[groups[1][0]]])
    assert source.get_samples(1)[0][0].prompt == "q3"


def test_user_class_that_returns_rows_and_texts(args):
    from slime.rollout.data_source_adapter import adapt_class

    class Rows:
        def get_samples(self, n):
            return [{"prompt": "a", "label": "1"}, "b"][:n]

    groups = adapt_class(args(apply_chat_template_kwargs={"a": 1}), Rows).get_samples(2)
    assert [sample.apply_chat_template_kwargs for group in groups for sample in group] == [{"a": 1}] * 4
    assert texts(groups) == ["a", "b"] and groups[0][1].label == "1"


def test_streaming_reads_rows_lazily_and_continues_after_a_restart(args, tmp_path):
    arguments = args(rows=3, streaming_data=True)
    source = RolloutDataSourceWithBuffer(arguments)
    assert len(source) == 0
    groups = source.get_samples(4)
    assert texts(groups) == ["p0", "p1", "p2", "p0"] and source.epoch_id == 1
    source.mark_finished(groups[:3])
    resumed = RolloutDataSourceWithBuffer(arguments)
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    found = resumed.get_samples(3)
    assert texts(found) == ["p0", "p1", "p2"] and found[0][0].index == groups[3][0].index


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_streaming_goes_on_at_its_place_without_reading_what_came_before(args, make_args, tmp_path, kind):
    path = tmp_path / f"many.{kind}"
    rows = [{"input": f"p{i}"} for i in range(2500)]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1000)
    arguments = make_args(prompt_data=f"{path}@[5:-3]", streaming_data=True, n_samples_per_prompt=1)
    source = RolloutDataSourceWithBuffer(arguments)
    source.mark_finished(source.get_samples(2100))
    state = through_file(source.state_dict(), tmp_path)
    if kind == "jsonl":
        text = path.read_text()
        path.write_text(text.replace('{"input": "p100"}', '{"input": broken'))
    resumed = RolloutDataSourceWithBuffer(arguments)
    resumed.load_state_dict(state)
    found = resumed.get_samples(394)
    assert texts(found[:2]) == ["p2105", "p2106"] and texts(found[-2:]) == ["p5", "p6"]
    assert found[-1][0].index == 2493 and check(resumed.state_dict()).problems == []


def test_streaming_drops_long_prompts_and_refuses_empty_sets_and_shuffling(args, make_args, write_rows):
    source = RolloutDataSource(
        make_args(
            prompt_data=write_rows([{"input": "x" * n} for n in (9, 2, 9)]),
            streaming_data=True,
            rollout_max_prompt_len=4,
        )
    )
    assert texts(source.get_samples(2)) == ["xx", "xx"] and source.dataset.num_too_long >= 2
    report = check(source.state_dict())
    assert report.problems == [] and [line["handed_out"] for line in report.lines] == [1, 1]
    with pytest.raises(ValueError, match="holds no usable prompt: 1 rows"):
        RolloutDataSource(
            make_args(prompt_data=write_rows([{"input": "x" * 9}]), streaming_data=True, rollout_max_prompt_len=4)
        )
    with pytest.raises(ValueError, match="--rollout-shuffle needs all rows"):
        RolloutDataSource(args(streaming_data=True, rollout_shuffle=True))
