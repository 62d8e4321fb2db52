import dataclasses

import numpy
import pytest
import torch

from slime.observability.debug_dump import load_rollout_dump, save_rollout_dump, take_both_ends
from slime.utils.types import Sample


def make_sample(index, **fields):
    sample = Sample(index=index, tokens=[1, 2, 3], response_length=2, reward=0.5, status=Sample.Status.TRUNCATED)
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def test_samples_come_back_with_every_field_and_extra_attribute(tmp_path):
    template = str(tmp_path / "deep" / "{rollout_id}.pt")
    samples = [make_sample(0, trace={"events": []}), make_sample(1, metadata={"k": (1, 2)})]
    save_rollout_dump(template, 3, samples)
    loaded = load_rollout_dump(template, 3)
    for before, after in zip(samples, loaded, strict=True):
        for field in dataclasses.fields(Sample):
            assert getattr(after, field.name) == getattr(before, field.name), field.name
    assert loaded[0].trace == {"events": []}


def test_a_dump_loads_with_weights_only_whatever_a_hook_attached(tmp_path):
    class Custom:
        def __str__(self):
            return "custom"

    metadata = {
        "array": numpy.arange(3),
        "strings": numpy.array(["a"]),
        "scalar": numpy.float32(0.5),
        "object": Custom(),
        "set": {1},
        "status": Sample.Status.ABORTED,
        "tensor": torch.ones(2),
    }
    path = save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0, [make_sample(0, metadata=metadata)])
    content = torch.load(path, weights_only=True)
    assert content["rollout_id"] == 0
    plain = content["samples"][0]["metadata"]
    assert plain["array"].tolist() == [0, 1, 2]
    assert (plain["strings"], plain["scalar"], plain["object"], plain["set"]) == (["a"], 0.5, "custom", [1])
    assert plain["status"] == "aborted"


@pytest.mark.parametrize(
    ("share", "kept"), [(None, [0, 1, 2, 3, 4]), (0.6, [0, 3, 4]), (1.0, [0, 1, 2, 3, 4]), (0.1, [])]
)
def test_a_subsample_takes_both_ends(share, kept):
    assert take_both_ends([0, 1, 2, 3, 4], share) == kept


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_outside_the_unit_interval_is_refused(share):
    with pytest.raises(ValueError, match="--load-debug-rollout-data-subsample"):
        take_both_ends([1], share)


def test_a_subsample_without_samples_is_named(tmp_path):
    save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0, [make_sample(0)] * 3)
    with pytest.raises(
        ValueError, match="--load-debug-rollout-data-subsample 0.1 of the 3 samples of .*0.pt leaves none"
    ):
        load_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0, 0.1)


def test_a_missing_or_foreign_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no dump for round 9 at"):
        load_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 9)
    torch.save([1], tmp_path / "8.pt")
    with pytest.raises(ValueError, match="no rollout dump"):
        load_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 8)


def test_no_half_written_file_is_left_under_the_name(tmp_path):
    save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0, [])
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]
