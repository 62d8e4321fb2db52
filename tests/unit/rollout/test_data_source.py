import copy
import random
from collections import Counter

import pytest
import torch

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, create_data_source, pop_first
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
    arguments = args()
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


def test_group_that_became_more_samples_is_served_again_with_one_per_request(args, tmp_path):
    source = RolloutDataSourceWithBuffer(args())
    first, second = source.get_samples(1)[0]
    source.add_samples([[[first, copy.deepcopy(first)], second]])  # finished surplus whose first sample fanned out
    source.get_samples(1)
    resumed = RolloutDataSourceWithBuffer(args())
    resumed.load_state_dict(through_file(source.state_dict(), tmp_path))
    assert [s.index for s in resumed.get_samples(1)[0]] == [0, 1]


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
        per_prompt = source.stats()["per_prompt"]
        settled = {row: sum(counts.values()) for row, counts in per_prompt.items()}
        open_groups = len(source.buffer) + len(source._requeued) + len(source.ledger.in_flight)
        handed_out = source.epoch_id * rows + source.sample_offset
        assert sum(settled.values()) + open_groups == handed_out == source.sample_group_index
        assert max(settled.values(), default=0) <= source.epoch_id + 1


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
    assert stats["per_prompt"] == {0: {"trained": 1}, 1: {"filtered": 1}, 2: {"aged_out": 1}, 3: {"failed": 1}}


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

    groups = adapt_class(args(), Rows).get_samples(2)
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


def test_streaming_drops_long_prompts_and_refuses_empty_sets_and_shuffling(args, make_args, write_rows):
    source = RolloutDataSource(
        make_args(
            prompt_data=write_rows([{"input": "x" * n} for n in (9, 2, 9)]),
            streaming_data=True,
            rollout_max_prompt_len=4,
        )
    )
    assert texts(source.get_samples(2)) == ["xx", "xx"] and source.dataset.num_too_long >= 2
    with pytest.raises(ValueError, match="holds no usable prompt: 1 rows"):
        RolloutDataSource(
            make_args(prompt_data=write_rows([{"input": "x" * 9}]), streaming_data=True, rollout_max_prompt_len=4)
        )
    with pytest.raises(ValueError, match="--rollout-shuffle needs all rows"):
        RolloutDataSource(args(streaming_data=True, rollout_shuffle=True))
