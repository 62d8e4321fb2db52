"""Recorded rounds as a rollout function."""

import math
from types import SimpleNamespace

import pytest

from slime.observability.debug_dump import save_rollout_dump
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.forge_load import generate_rollout
from slime.utils.types import Sample


@pytest.fixture
def template(tmp_path):
    path = str(tmp_path / "{rollout_id}.pt")
    samples = [Sample(index=i, group_index=i // 2, tokens=[1, 2], response_length=1, reward=float(i)) for i in range(4)]
    samples[1].rollout_id = 9
    save_rollout_dump(path, 0, samples)
    save_rollout_dump(path, 3, samples[:2])
    save_rollout_dump(path, "eval_3", samples[:1])
    return path


def call(template, rollout_id, evaluation=False):
    args = SimpleNamespace(load_forge_rollout_data=template, eval_reward_key=None, reward_key=None)
    return call_rollout_fn(generate_rollout, args, rollout_id, None, evaluation=evaluation)


def test_each_round_reads_its_file_and_falls_back_to_the_first(template):
    assert [[s.index for s in group] for group in call(template, 3).samples] == [[0, 1]]
    groups = call(template, 7).samples
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3]] and groups[0][1].rollout_id == 9


def test_evaluation_reads_its_own_file_and_has_no_fallback(template):
    (result,) = call(template, 3, evaluation=True).data.items()
    assert result[0] == "forge_eval" and result[1]["rewards"] == [0.0] and result[1]["truncated"] == [False]
    with pytest.raises(RuntimeError, match="eval_0.pt does not exist"):
        call(template, 0, evaluation=True)


def test_a_failed_reward_of_an_evaluation_is_nan_as_when_it_was_made(template):
    samples = [Sample(index=i, reward=float(i)) for i in range(2)]
    samples[0].metadata["reward_error"] = "TimeoutError: no reward"
    save_rollout_dump(template, "eval_5", samples)
    rewards = call(template, 5, evaluation=True).data["forge_eval"]["rewards"]
    assert math.isnan(rewards[0]) and rewards[1] == 1.0


def test_a_literal_path_is_every_round_and_no_evaluation(template):
    path = template.replace("{rollout_id}", "3")
    assert len(call(path, 0).samples) == len(call(path, 50).samples) == 1
    assert call(path, 50, evaluation=True).data == {}


def test_missing_file_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="nowhere.pt does not exist"):
        call(str(tmp_path / "nowhere.pt"), 0)
