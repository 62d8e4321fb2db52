"""Supervised fine-tuning through ``train.py``, as scripts of the field start it: no engine, loss of held-out rows."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import assert_all_ends, write_rows


def conversation(number: int) -> dict:
    """A chat of two turns with a tool, whose first answer is not to be trained."""
    weather = [{"type": "function", "function": {"name": "weather"}}]
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": "Let me see", "step_loss_mask": number % 2},
            {"role": "tool", "content": str(number + 1)},
            {"role": "assistant", "content": f"It is {number + 1}."},
        ],
        "tools": weather,
    }


@pytest.mark.parametrize("per_token", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sft_script_trains_on_conversations_and_evaluates_their_loss(train, tmp_path, per_token):
    rows = [conversation(number) for number in range(8)]
    data = write_rows(tmp_path / "chat.jsonl", rows)
    flags = (
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --input-key messages "
        "--disable-compute-advantages-and-returns --debug-train-only --num-rollout 3 --rollout-batch-size 8 "
        "--global-batch-size 8 --lr 2e-3 --lr-decay-style constant --actor-num-gpus-per-node 2 --eval-interval 1"
    ).split()
    sets = ("same", data, "odd", f"{data}@[5:8]")
    run = train(
        *(*flags, "--prompt-data", data, "--eval-prompt-data", *sets),
        *(["--calculate-per-token-loss"] if per_token else []),
    )
    assert_all_ends(run.directory)
    assert not list((run.directory / "logs").glob("engine*"))
    losses, held_out = run.series("train/loss"), run.series("eval/same-loss")
    assert losses[2] < losses[1] < losses[0] and not run.series("rollout/raw_reward")
    assert held_out[:3] == pytest.approx(
        losses, rel=1e-4
    )  # the set is the round's batch; evaluated before it is trained
    assert len(held_out) == 4 and len(run.series("eval/odd-loss")) == 4
