"""Whole runs with the trainer on two slots: tensor, pipeline and context parallel train what one slot trains."""

from __future__ import annotations

import pytest

COMMON = (
    "--rollout-num-gpus 1 --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --num-rollout 2 "
    "--sglang-context-length 64 --lr 1e-3 --custom-rm-path tests.e2e.hooks.first_token_is_even --check-weight-update-equal "
    "--use-kl-loss --kl-loss-coef 0.05 --use-dynamic-batch-size --max-tokens-per-gpu 128"
).split()
LAYOUTS = {
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--pipeline-model-parallel-size 2 --colocate",  # ranks that sleep take part in the export too
    "context": "--context-parallel-size 2",
}


@pytest.fixture(scope="module")
def straight():
    return {}


@pytest.mark.parametrize(
    "name",
    ["tensor", pytest.param("pipeline", marks=pytest.mark.slow), pytest.param("context", marks=pytest.mark.slow)],
)
def test_layout_trains_like_one_slot(train, straight, name):
    """Engines get the same weights, so rewards are equal; --check-weight-update-equal compares every tensor they hold."""
    if not straight:
        run = train(*COMMON, "--actor-num-gpus-per-node", 1, name="one")
        straight["metrics"] = run.metrics("train/step"), run.series("rollout/raw_reward")
    run = train(*COMMON, "--actor-num-gpus-per-node", 2, *LAYOUTS[name].split(), name=name)
    steps, rewards = straight["metrics"]
    assert run.series("rollout/raw_reward") == rewards and len(steps) == 2
    for expected, found in zip(steps, run.metrics("train/step"), strict=True):
        for metric, value in expected.items():
            if metric.startswith("train/"):
                assert found[metric] == pytest.approx(value, abs=2e-5, rel=2e-4), metric
