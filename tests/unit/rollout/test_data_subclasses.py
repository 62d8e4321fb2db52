"""Users' subclasses of the Data Buffer with methods of their own: same order, accounted for, and there again after a restart."""

import copy
import heapq
import json

import pytest
import torch

from slime.rollout import data_state
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.data_source_adapter import adapt_class
from slime.rollout.ledger_check import check


@pytest.fixture
def args(make_args, write_rows):
    def make(rows=6, **overrides):
        return make_args(prompt_data=write_rows([{"input": f"p{i}", "label": i} for i in range(rows)]), **overrides)

    return make


class Slices(RolloutDataSourceWithBuffer):
    """Takes prompts out of the data set and makes groups of them, as the field's sources do."""

    def get_samples(self, num_samples):
        groups = self._get_samples_from_buffer(num_samples)
        end = self.sample_offset + num_samples - len(groups)
        prompts = self.dataset.samples[self.sample_offset : end]
        self.sample_offset = end
        if end > len(self.dataset):
            self.epoch_id += 1
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
            self.sample_offset = end - len(self.dataset)
            prompts += self.dataset.samples[: self.sample_offset]
        for prompt in prompts:
            group = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
            for sample in group:
                sample.group_index, sample.index = self.sample_group_index, self.sample_index
                self.sample_index += 1
            self.sample_group_index += 1
            groups.append(group)
        return groups


class Heap(RolloutDataSourceWithBuffer):
    """Keeps what comes back in a place of its own, the last prompt first, and writes it down itself."""

    def __init__(self, args):
        super().__init__(args)
        self.heap = []

    def get_samples(self, num_samples):
        groups = []
        while self.heap and len(groups) < num_samples:
            groups.append(heapq.heappop(self.heap)[1])
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples):
        for group in samples:
            heapq.heappush(self.heap, (-group[0].group_index, group))

    def save(self, rollout_id):
        super().save(rollout_id)
        rows = [[key, [sample.to_dict() for sample in group]] for key, group in self.heap]
        with open(f"{self.args.save}/heap_{rollout_id}.json", "w") as file:
            json.dump(rows, file)

    def load(self, rollout_id=None):
        from slime.utils.types import Sample

        super().load(rollout_id)
        with open(f"{self.args.load}/heap_{rollout_id}.json") as file:
            self.heap = [(key, [Sample.from_dict(sample) for sample in group]) for key, group in json.load(file)]


class AsyncHeap(Heap):
    async def save(self, rollout_id):
        super().save(rollout_id)

    async def load(self, rollout_id=None):
        super().load(rollout_id)


class Ahead(RolloutDataSourceWithBuffer):
    """Takes more from ours than it is asked for, and gives the rest out later."""

    def __init__(self, args):
        super().__init__(args)
        self.ahead = []

    def get_samples(self, num_samples):
        while len(self.ahead) < num_samples:
            self.ahead += super().get_samples(4)
        groups, self.ahead = self.ahead[:num_samples], self.ahead[num_samples:]
        return groups


class AheadSaved(Ahead):
    def save(self, rollout_id):
        self.saved = copy.deepcopy(self.ahead)

    def load(self, rollout_id=None):
        self.ahead = self.kept_elsewhere


class Easy(RolloutDataSourceWithBuffer):
    """Leaves prompts out and puts the others into an order of its own."""

    def __init__(self, args):
        super().__init__(args)
        self.dataset.samples = [self.dataset.samples[row] for row in (4, 0, 2)]


def texts(groups):
    return [group[0].prompt for group in groups]


def resumed(arguments, cls, source, folder):
    data_state.save(arguments, source, str(folder), 3)
    again = adapt_class(arguments, cls)
    data_state.load(arguments, again, str(folder), 3)
    return again


@pytest.mark.parametrize("shuffle", [False, True])
def test_groups_of_a_subclass_are_those_of_the_built_in_source_and_in_the_ledger(args, tmp_path, shuffle):
    arguments = args(rollout_shuffle=shuffle)
    source, built_in = adapt_class(arguments, Slices), RolloutDataSource(arguments)
    groups = source.get_samples(4)
    assert texts(groups) == texts(built_in.get_samples(4))
    source.mark_delivered(groups[:1], 3)
    source.mark_finished(groups[:1])
    source.mark_finished(groups[1:2], "filtered")
    source.add_samples(groups[2:3])
    stats = source.stats()
    assert [stats[name] for name in ("trained", "filtered", "in_flight", "buffered")] == [1, 1, 1, 1]
    assert check(source.state_dict()).problems == []
    again = resumed(arguments, Slices, source, tmp_path)
    back = again.get_samples(5)  # in flight, from the buffer, and over the end of the epoch
    assert texts(back) == texts([groups[3], groups[2], *built_in.get_samples(3)])
    assert [group[0].group_index for group in back] == [3, 2, 4, 5, 6]
    again.mark_finished(back)
    report = check(again.state_dict())
    assert report.problems == [] and report.lines[0]["trained"] == 6 and report.lines[0]["handed_out"] == 7


@pytest.mark.parametrize("cls", [Heap, AsyncHeap])
def test_what_a_subclass_keeps_and_writes_itself_is_there_once_after_a_restart(args, tmp_path, cls):
    arguments = args()
    source = adapt_class(arguments, cls)
    groups = source.get_samples(3)
    source.mark_finished(groups[:1])
    source.add_samples(groups[1:2])
    assert check(source.state_dict()).problems == [] and source.stats()["in_flight"] == 1
    again = resumed(arguments, cls, source, tmp_path)
    assert (tmp_path / "heap_3.json").exists() and arguments.save != str(tmp_path)
    back = again.get_samples(3)
    assert texts(back) == ["p2", "p1", "p3"]  # in flight, the class's own, new
    again.mark_finished(back)
    assert again.stats()["trained"] == 4 and check(again.state_dict()).problems == []


@pytest.mark.parametrize("cls", [Ahead, AheadSaved])
def test_what_a_subclass_takes_ahead_keeps_its_row_and_is_there_once_after_a_restart(args, tmp_path, cls):
    arguments = args(rows=8)
    source = adapt_class(arguments, cls)
    groups = source.get_samples(3) + source.get_samples(2)
    assert [group[0].group_index for group in groups] == [0, 1, 2, 3, 4]
    source.mark_finished(groups)
    report = check(source.state_dict())
    assert report.problems == [] and (report.lines[0]["trained"], len(report.lines)) == (5, 1)
    cls.kept_elsewhere = source.ahead
    again = resumed(arguments, cls, source, tmp_path)
    back = again.get_samples(2) + again.get_samples(1)
    assert texts(back) == ["p5", "p6", "p7"]
    again.mark_finished(back)
    report = check(again.state_dict())
    assert report.problems == [] and (report.lines[0]["trained"], len(report.lines)) == (8, 1)


def test_prompts_that_a_subclass_chose_and_ordered_are_handed_out_so_before_and_after_a_restart(args, tmp_path):
    arguments = args()
    source = adapt_class(arguments, Easy)
    groups = source.get_samples(2)
    assert texts(groups) == ["p4", "p0"]
    source.mark_finished(groups[:1])
    again = resumed(arguments, Easy, source, tmp_path)
    back = again.get_samples(3)
    assert texts(back) == ["p0", "p2", "p4"]  # in flight, the third, and the first of the next epoch
    again.mark_finished(back)
    assert check(again.state_dict()).problems == [] and again.stats()["trained"] == 4


@pytest.mark.parametrize("taken", [2, 4])
def test_prompts_that_a_subclass_chose_are_shuffled_in_later_epochs_the_same_after_a_restart(args, tmp_path, taken):
    arguments = args(rollout_shuffle=True)
    straight, source = adapt_class(arguments, Easy), adapt_class(arguments, Easy)
    expected = texts(straight.get_samples(12))
    assert [len({*expected[i : i + 3]}) for i in (0, 3, 6, 9)] == [3] * 4 and {*expected} == {*expected[:3]}
    assert len({*(tuple(expected[i : i + 3]) for i in (0, 3, 6, 9))}) > 1
    source.mark_finished(source.get_samples(taken))
    again = resumed(arguments, Easy, source, tmp_path)
    assert texts(again.get_samples(12 - taken)) == expected[taken:]


@pytest.mark.parametrize("was_shuffled", [False, True])
def test_samples_of_the_data_set_have_the_order_of_the_epoch_also_where_the_flag_has_changed(args, was_shuffled):
    first = adapt_class(args(rollout_shuffle=was_shuffled), RolloutDataSource)
    first.get_samples(2)
    again = adapt_class(args(rollout_shuffle=not was_shuffled), RolloutDataSource)
    again.load_state_dict(first.state_dict())
    assert again.dataset.samples == first.dataset.samples
    again.get_samples(7)  # two in flight, four that were left, and one of the next epoch
    in_file_order = again.dataset.samples == again.dataset.origin_samples
    assert again.epoch_id == 1 and in_file_order == was_shuffled


def test_what_a_subclass_keeps_and_does_not_write_is_handed_out_again_after_a_restart(args, tmp_path):
    class Unwritten(Heap):
        save, load = RolloutDataSourceWithBuffer.save, RolloutDataSourceWithBuffer.load

    arguments = args()
    source = adapt_class(arguments, Unwritten)
    groups = source.get_samples(3)
    source.mark_finished(groups[:1])
    source.add_samples(groups[1:])
    assert texts(source.get_samples(1)) == ["p2"]
    again = resumed(arguments, Unwritten, source, tmp_path)
    back = again.get_samples(3)
    assert texts(back) == ["p1", "p2", "p3"]
    again.mark_finished(back)
    report = check(again.state_dict())
    assert report.problems == [] and (report.lines[0]["trained"], len(report.lines)) == (4, 1)


def test_a_group_that_comes_back_to_a_subclass_is_in_flight_again_with_its_row(args):
    source = adapt_class(args(), Heap)
    source.add_samples(source.get_samples(2))
    back = source.get_samples(2)
    assert texts(back) == ["p1", "p0"]
    source.mark_finished(back)
    line = check(source.state_dict()).lines[0]
    assert (line["epoch"], line["trained"], line["waiting"]) == (0, 2, 0)


def test_pairs_in_the_buffer_are_left_to_the_subclass(args, caplog):
    class Pairs(Heap):
        def add_samples(self, samples):
            self.buffer += [(group[0].group_index, group) for group in samples]

    source = adapt_class(args(), Pairs)
    groups = source.get_samples(2)
    source.add_samples(groups[:1])
    source.mark_delivered(groups, 0)
    assert source.state_dict()["buffer"] == []
    assert "the buffer of Pairs holds 1 entries that are no groups: its own save and load" in caplog.text


@pytest.mark.parametrize("form", ["attribute", "method", "seed method"])
def test_a_buffer_filter_of_the_subclass_is_asked_in_each_form(args, form):
    def newest(args, rollout_id, buffer, num_samples):
        assert rollout_id is None
        return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]

    class Newest(RolloutDataSourceWithBuffer):
        if form == "attribute":

            def __init__(self, args):
                super().__init__(args)
                self.buffer_filter = newest

        elif form == "method":

            def buffer_filter(self, args, rollout_id, buffer, num_samples):
                return newest(args, rollout_id, buffer, num_samples)

        else:

            def buffer_filter(self, args, buffer, num_samples):
                return newest(args, None, buffer, num_samples)

    source = adapt_class(args(), Newest)
    source.add_samples(source.get_samples(2))
    assert texts(source.get_samples(2)) == ["p1", "p0"]


def test_what_a_method_of_a_subclass_raises_is_said_with_the_flag(args):
    class Broken(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples):
            return self.datasets[:num_samples]

    source = adapt_class(args(data_source_path="mine.Broken"), Broken)
    with pytest.raises(
        RuntimeError, match=r"--data-source-path mine.Broken raised AttributeError: (?s:.*)self\.datasets"
    ):
        source.get_samples(1)


def test_a_state_of_a_subclass_that_could_not_be_read_back_is_refused_when_saving(args, tmp_path):
    source = adapt_class(args(data_source_path="mine.Slices"), Slices)
    source.metadata["lock"] = torch.nn.Linear
    with pytest.raises(ValueError, match="--data-source-path mine.Slices: its state_dict must hold numbers"):
        data_state.save(source.args, source, str(tmp_path), 0)


def test_a_function_that_gives_samples_is_told_that_a_source_is_wanted():
    from slime.utils.hook_calls import check_signature

    with pytest.raises(ValueError, match=r"--data-source-path mine.give is .*\(num_samples\); expected class"):
        check_signature("data_source_path", lambda num_samples: [], "mine.give")
