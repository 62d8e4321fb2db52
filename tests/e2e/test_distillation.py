"""On-policy distillation through ``train.py``: the student approaches its teacher, whoever scores."""

from __future__ import annotations

import pytest

from slime.utils.tiny_model import make_tiny_model
from tests.e2e.test_sync_loop import SMALL
from tests.engine.engine_process import serving

DISTILL = (*SMALL, *"--use-opd --num-rollout 12 --lr 2e-3 --rollout-batch-size 16 --n-samples-per-prompt 8".split())


@pytest.fixture
def teacher(tmp_path):
    """(folder, URL of an engine that serves it)."""
    folder = make_tiny_model(tmp_path / "teacher", head_dim=16, init_std=0.1, seed=5)
    with serving(folder) as (url, _):
        yield folder, url


@pytest.mark.slow
def test_a_teacher_on_an_engine_teaches_what_one_in_the_trainer_does(train, teacher, tmp_path):
    folder, url = teacher
    no_task = tmp_path / "no_task.py"
    no_task.write_text("async def reward_func(args, sample, **kwargs):\n    return 0.0\n")
    hooks = "slime.rollout.on_policy_distillation"
    engine = train(
        *(*DISTILL, "--opd-type", "sglang", "--rm-url", f"{url}/generate", "--custom-rm-path", f"{hooks}.reward_func"),
        *("--custom-reward-post-process-path", f"{hooks}.post_process_rewards"),
        name="engine",
    )
    trainer = train(
        *(*DISTILL, "--opd-type", "megatron", "--opd-teacher-load", folder, "--custom-rm-path", no_task), name="trainer"
    )
    for metric, tolerance in {
        "rollout/teacher_log_probs": 1e-4,
        "rollout/opd_reverse_kl": 1e-4,
        "train/grad_norm": 5e-3,
    }.items():
        expected = trainer.series(metric)
        assert len(expected) == 12 and engine.series(metric) == pytest.approx(expected, abs=tolerance, rel=1e-3), metric
    gaps = engine.series("rollout/opd_reverse_kl")
    assert sum(gaps[-3:]) < 0.8 * sum(gaps[:3])
