"""Engines on quantised weights: every sync sends them in the checkpoint's form, and the gap to the trainer is reported."""

from __future__ import annotations

import pytest

from slime.utils.quantized_folder import fp8_config, int4_config, quantize_folder

FLAGS = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --sglang-context-length 64 --num-rollout 2 "
    "--actor-num-gpus-per-node 1 --lr 1e-3 --custom-rm-path tests.e2e.hooks.first_token_is_even --check-weight-update-equal"
).split()


@pytest.mark.parametrize(
    "name, slots",
    [("fp8", ("--rollout-num-gpus", 1)), pytest.param("int4", ("--colocate",), marks=pytest.mark.slow)],
)
def test_quantised_rollout_weights_leave_a_small_gap(train, workspace, tmp_path, name, slots):
    config = {"fp8": fp8_config((128, 128)), "int4": int4_config(32, True, ["lm_head"])}[name]
    quantize_folder(workspace.model, tmp_path / name, config)
    run = train(*FLAGS, *slots, "--hf-checkpoint", tmp_path / name, "--load", workspace.model)
    gaps = run.series("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 2 and all(1e-5 < gap < 0.2 for gap in gaps)
