"""What the Data Buffer's process derives from prompts and flags."""

from types import SimpleNamespace

import pytest

from slime.ray.rollout_manager import RolloutManager


def info(num_rows: int, **changes) -> dict:
    args = SimpleNamespace(
        **(dict(num_rollout=None, num_epoch=2, rollout_batch_size=4, prompt_data="rows.jsonl") | changes)
    )
    manager = RolloutManager(args, slots=None, host="127.0.0.1")
    manager._data_source = range(num_rows)
    return manager._info()


def test_fb_d11_epochs_decide_how_many_rounds_there_are_unless_rounds_are_given():
    assert info(10)["num_rollout"] == 5  # a batch may span two epochs
    assert info(10)["num_rollout_per_epoch"] == 2
    given = info(10, num_rollout=7)
    assert (given["num_rollout"], given["num_rollout_per_epoch"]) == (7, None)


def test_less_than_one_round_is_refused():
    with pytest.raises(ValueError, match="--num-epoch 1 over 3 prompts.*less than one round"):
        info(3, num_epoch=1)
