"""A mixture of experts through ``train.py``: the trainer takes the experts that the engine took."""

from __future__ import annotations

import pytest

from slime.utils.tiny_model import Experts, make_tiny_model

SMALL = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --sglang-context-length 64 "
    "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lr 1e-3 --custom-rm-path tests.e2e.hooks.first_token_is_even"
).split()


@pytest.mark.slow
def test_engine_and_trainer_agree_on_experts_round_after_round(train, tmp_path):
    model = make_tiny_model(tmp_path / "model", arch="qwen3_moe", experts=Experts(count=8, dense_layers=(0,)))
    run = train(
        *SMALL,
        *("--hf-checkpoint", model, "--num-rollout", 2, "--num-steps-per-rollout", 2, "--use-rollout-routing-replay"),
        *("--check-weight-update-equal", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 64),
        *("--rollout-num-gpus", 2, "--save-hf", tmp_path / "hf_{rollout_id}", "--save-interval", 2),
    )
    assert "pass-through router" in run.output
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-5
    assert min(run.series("train/moe_replayed")) > 0.8
    assert max(run.series("train/moe_max_load")) >= 1
    assert len(run.metrics("train/step")) == 4
