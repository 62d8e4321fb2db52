"""The Data Buffer in a checkpoint directory: ours, and users' classes in their documented forms."""

import threading

import pytest
import torch

from slime.rollout import data_state
from slime.rollout.data_source import create_data_source
from slime.rollout.data_source_adapter import adapt_class
from slime.rollout.ledger_check import check
from slime.utils.types import Sample


@pytest.fixture
def args(make_args, write_rows, tmp_path):
    path = write_rows([{"input": f"p{i}"} for i in range(6)])
    return make_args(prompt_data=path, save="unused", load="unused", data_source_path="mine.py")


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_state_goes_on_where_it_was_saved(make_args, write_rows, tmp_path):
    args = make_args(prompt_data=write_rows([{"input": f"p{i}"} for i in range(6)]), save=str(tmp_path))
    source = create_data_source(args)
    source.mark_finished(source.get_samples(2))
    data_state.save(args, source, str(tmp_path), 0)
    resumed = create_data_source(args)
    data_state.load(args, resumed, str(tmp_path), 0)
    assert prompts(resumed.get_samples(2)) == ["p2", "p3"]


def test_checkpoint_without_a_data_buffer_starts_from_the_beginning(args, tmp_path, caplog):
    source = adapt_class(args, Counting)
    data_state.load(args, source, str(tmp_path), 0)
    assert "holds no data_buffer.pt" in caplog.text


class Counting:
    """A user's class with save and load of its own, as the public contract has it."""

    def __init__(self, args):
        self.args, self.next = args, 0

    def get_samples(self, num_samples):
        self.next += num_samples
        return [[Sample(prompt=str(self.next - num_samples + i))] for i in range(num_samples)]

    def save(self, rollout_id):
        with open(f"{self.args.save}/mine_{rollout_id}", "w") as file:
            file.write(str(self.next))

    def load(self, rollout_id):
        with open(f"{self.args.load}/mine_{rollout_id}") as file:
            self.next = int(file.read())


def test_users_own_save_and_load_go_through_the_checkpoint_directory(args, tmp_path, caplog):
    source = adapt_class(args, Counting)
    source.mark_finished(source.get_samples(3)[:2])
    data_state.save(args, source, str(tmp_path), 4)
    assert (tmp_path / "mine_4").read_text() == "3" and args.save == "unused"
    resumed = adapt_class(args, Counting)
    data_state.load(args, resumed, str(tmp_path), 4)
    again, fresh = resumed.get_samples(2)
    assert again[0].prompt == "2" and again[0].index == 2  # it was in flight
    assert fresh[0].prompt == "3" and fresh[0].index == 3  # numbering goes on too
    assert resumed.stats()["trained"] == 2 and not caplog.text
    state = torch.load(tmp_path / data_state.FILE, weights_only=True)
    assert check(state).problems == []


def test_state_of_a_user_class_that_could_not_be_read_back_is_refused_when_saving(args, tmp_path):
    class Source(Counting):
        def state_dict(self):
            return {"lock": threading.Event}

    with pytest.raises(ValueError, match="--data-source-path mine.py: its state_dict must hold"):
        data_state.save(args, adapt_class(args, Source), str(tmp_path), 0)


def test_groups_of_a_user_class_are_accounted_for(args, tmp_path):
    source = adapt_class(args, Counting)  # it has no add_samples: what comes back is dropped
    groups = source.get_samples(4)
    source.mark_delivered(groups[:1], 0)
    source.mark_finished(groups[:1])
    source.mark_finished(groups[1:2], "filtered")
    source.add_samples(groups[2:3])
    stats = source.stats()
    assert [stats[name] for name in ("trained", "filtered", "aged_out", "in_flight")] == [1, 1, 1, 1]
    report = check(source.state_dict())
    assert report.problems == [] and report.lines[0]["handed_out"] == 4

    class Keeping(Counting):
        def add_samples(self, samples):
            self.kept = samples

        def get_samples(self, num_samples):
            kept, self.kept = getattr(self, "kept", []), []
            return kept or super().get_samples(num_samples)

    source = adapt_class(args, Keeping)
    source.add_samples(source.get_samples(2))
    assert check(source.state_dict()).lines == [] and source.stats()["in_flight"] == 0
    source.mark_finished(source.get_samples(2))
    assert source.stats()["trained"] == 2 and check(source.state_dict()).problems == []
