"""Weights that are put in place for one pass: the teacher, the policies that generated earlier rounds; cleared moments."""

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args

CUT = [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("other"), init_std=0.1, seed=7)


def start(args):
    from slime.backends.megatron_utils.actor import MegatronActor

    actor = MegatronActor(args, 0, 1, "127.0.0.1", 0)
    actor.init()
    return actor


def log_probs_of(folder, shard) -> list[torch.Tensor]:
    return start(train_args(folder, keep_old_actor=True)).score(0, shard)["log_probs"]


def test_teacher_weights_score_the_responses_and_pull_the_advantages(model_dir, other_dir):
    shard = make_shard(None, micro_batches=CUT)
    flags = dict(use_opd=True, opd_type="megatron", opd_teacher_load=str(other_dir), opd_kl_coef=0.5)
    actor = start(train_args(model_dir, **flags))
    before = actor.export_checksums()
    scored = actor.score(0, shard)
    assert scored["passes"] == ["teacher", "actor"] and actor.export_checksums() == before
    teacher, student = log_probs_of(other_dir, shard), log_probs_of(model_dir, shard)
    for got, expected in zip(scored["teacher_log_probs"], teacher, strict=True):
        torch.testing.assert_close(got, expected)
    report = actor.train(0, shard)["rollout"]
    gaps = [s - t for s, t in zip(student, teacher, strict=True)]
    assert report["rollout/opd_reverse_kl"] == pytest.approx(sum(float(g.mean()) for g in gaps) / 4, abs=1e-5)
    expected = sum(reward - 0.5 * float(gap.mean()) for reward, gap in zip(shard["rewards"], gaps, strict=True)) / 4
    assert report["rollout/advantages"] == pytest.approx(expected, abs=1e-5)
    assert {"perf/teacher_log_probs_time", "rollout/teacher_log_probs"} <= report.keys()


def test_reference_and_teacher_are_both_kept(model_dir, other_dir):
    flags = dict(use_opd=True, opd_type="megatron", opd_teacher_load=str(other_dir), ref_load=str(model_dir))
    actor = start(train_args(model_dir, use_kl_loss=True, kl_loss_coef=0.1, load=str(model_dir), **flags))
    scored = actor.score(0, make_shard(None, micro_batches=CUT))
    assert scored["passes"] == ["ref", "teacher", "actor"]
    same, different = scored["ref_log_probs"], scored["teacher_log_probs"]
    assert all(torch.equal(a, b) for a, b in zip(same, scored["log_probs"], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(different, scored["log_probs"], strict=True))


def test_old_log_probs_are_those_of_the_version_that_generated_the_round(model_dir):
    """Rounds 0, 1 and 2 were generated with version 0, round 3 with version 1, as a look-ahead loop does."""
    actor = start(train_args(model_dir, keep_old_actor=True, lr=1e-2, num_rollout=8))
    shard = make_shard(None, micro_batches=CUT)
    of_version = {}
    steps = []
    for rollout_id, (version, in_use) in enumerate([(0, {0}), (0, {0}), (0, {0, 1}), (1, {1, 2})]):
        if rollout_id in (0, 1, 3):  # what engines were given before: versions 0, 1, 2
            number = {0: 0, 1: 1, 3: 2}[rollout_id]
            of_version[number] = actor.score(rollout_id, shard)["log_probs"]
            actor.remember(number, in_use)
        scored = actor.score(rollout_id, shard, version)
        for got, expected in zip(scored["log_probs"], of_version[version], strict=True):
            assert torch.equal(got, expected)
        trained = actor.export_checksums()
        steps.append(actor.train(rollout_id, shard, old_version=version)["steps"][rollout_id])
        assert actor.export_checksums() != trained
    kept = sorted(tag for tag in actor.backup.tags() if tag != "actor")
    assert kept == ["old_actor 1", "old_actor 2"]  # version 0 is forgotten
    assert abs(steps[0]["train/ppo_kl"]) < 1e-6 and all(abs(step["train/ppo_kl"]) > 1e-4 for step in steps[1:])
    with pytest.raises(AssertionError, match="old_actor 0"):
        actor.train(4, shard, old_version=0)


def test_without_the_flag_no_copy_is_kept_and_the_current_weights_are_the_old_ones(model_dir):
    actor = start(train_args(model_dir))
    actor.remember(0, {0})
    assert actor.backup.tags() == set()
    assert actor.train(0, make_shard(None, micro_batches=CUT), old_version=0)["steps"][0]["train/ppo_kl"] == 0


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_cleared_moments_make_every_round_the_first(model_dir, optimizer):
    flags = dict(optimizer=optimizer, sgd_momentum=0.9, lr=1e-2, reset_optimizer_states=True)
    shard = make_shard(None, micro_batches=CUT)
    going_on = start(train_args(model_dir, **flags))
    going_on.train(0, shard)
    fresh = start(train_args(model_dir, **flags))
    with torch.no_grad():
        for own, other in zip(fresh.model[0].parameters(), going_on.model[0].parameters(), strict=True):
            own.copy_(other)
    fresh.optimizer.reload_model_params()
    for actor in (going_on, fresh):
        actor.train(1, shard)
    assert going_on.export_checksums() == fresh.export_checksums()


def test_clearing_starts_the_step_count_of_fused_optimizers_and_passes_over_empty_ones():
    """Fused Adams count in the group; a chain holds a member without parameters when only experts are trained."""
    from types import SimpleNamespace

    from slime.backends.megatron_utils.optimizer import reset_states

    inner = SimpleNamespace(state={0: {"exp_avg": torch.ones(2)}}, param_groups=[{"params": [], "step": 7}])
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=inner)])
    reset_states(chain)
    assert inner.param_groups[0]["step"] == 0 and inner.state[0]["exp_avg"].tolist() == [0, 0]


@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 1e-5), ("bf16", 2**-7)])
def test_stateless_adam_steps_as_adam_does_with_cleared_moments_and_keeps_none(model_dir, precision, rounding):
    # A large epsilon: where a gradient is nearly zero Adam magnifies its rounding.
    flags = dict(lr=1e-2, adam_eps=1e-4, weight_decay=0.1, precision=precision, lr_decay_style="cosine")
    shard = make_shard(None, micro_batches=CUT)
    stateless = start(train_args(model_dir, use_stateless_adam=True, no_save_optim=True, **flags))
    cleared = start(train_args(model_dir, reset_optimizer_states=True, **flags))
    for i in range(2):
        reports = [actor.train(i, shard)["steps"][i] for actor in (stateless, cleared)]
        assert reports[0]["train/lr-pg_0"] == reports[1]["train/lr-pg_0"] < 1e-2
    weights = [dict(actor.export_weights()) for actor in (stateless, cleared)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=1e-6, rtol=rounding)
    assert not any(part.state for part in (p.optimizer for p in stateless.optimizer.chained_optimizers))


def test_run_without_saved_moments_goes_on_with_its_schedule(model_dir, tmp_path):
    flags = dict(use_stateless_adam=True, no_save_optim=True, lr=1e-2, lr_decay_style="linear", num_rollout=4)
    shard = make_shard(None, micro_batches=CUT)
    actor = start(train_args(model_dir, **flags))
    actor.train(0, shard)
    directory = tmp_path / "iter_0000000"
    directory.mkdir()
    actor.save(str(directory))
    straight = actor.train(1, shard)["steps"][1]
    from slime.backends.megatron_utils.actor import MegatronActor

    resumed = MegatronActor(train_args(model_dir, **flags), 0, 1, "127.0.0.1", 0)
    assert resumed.init(str(directory)) == 1
    assert resumed.train(1, shard)["steps"][1] == straight
    assert resumed.export_checksums() == actor.export_checksums()
