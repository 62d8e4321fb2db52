"""`--share-prompts` and `--skip-zero-advantage`: less is computed, the gradient stays."""

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, random_tokens
from tests.unit.megatron.test_gradients import assert_same, gradient

PROMPTS = (5, 9, 4)  # of three groups of three samples
RESPONSES = (4, 6, 1, 8, 8, 3, 20, 2, 5)
LENGTHS = tuple(PROMPTS[i // 3] + n for i, n in enumerate(RESPONSES))
CUTS = {"one": [list(range(9))], "groups_cut": [[0, 1, 3, 8], [2, 4, 5], [6, 7]], "single": [[i] for i in range(9)]}
WITH_AND_WITHOUT = [1.0, -0.5, -0.5, 0.0, 0.0, 0.0, 0.7, -1.4, 0.7]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def shard_of(cut, rewards=WITH_AND_WITHOUT):
    """Groups that share their prompt ids; a partly and a fully masked sample; old log-probs off the policy."""
    prompts = random_tokens(PROMPTS, seed=1)
    answers = random_tokens(RESPONSES, seed=2)
    generator = torch.Generator().manual_seed(3)
    masks = [torch.ones(n, dtype=torch.int32) for n in RESPONSES]
    masks[1][2] = 0
    masks[7][:] = 0
    return make_shard(
        None, LENGTHS, RESPONSES, cut,
        tokens=[torch.cat([prompts[i // 3], answer]) for i, answer in enumerate(answers)],
        loss_masks=masks, rewards=list(rewards),
        rollout_log_probs=[-torch.rand(n, generator=generator) * 6 for n in RESPONSES],
    )  # fmt: skip


VARIANTS = {
    "grpo": {},
    "per_token": {"calculate_per_token_loss": True},
    "gspo_old_policy": {"advantage_estimator": "gspo", "use_rollout_logprobs": True},
    "cispo_per_token": {"advantage_estimator": "cispo", "calculate_per_token_loss": True, "use_tis": True},
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())
def test_both_savings_leave_the_gradient_and_the_loss(model_dir, flags, cut):
    flags = dict(flags, global_batch_size=9)
    reference, expected = gradient(model_dir, shard_of(cut), **flags)
    assert max(g.abs().max() for g in reference.values()) > 1e-3
    for saving in (
        {"share_prompts": True},
        {"skip_zero_advantage": True},
        {"share_prompts": True, "skip_zero_advantage": True},
    ):
        other, got = gradient(model_dir, shard_of(cut), **flags, **saving)
        assert_same(reference, other)
        names = (
            expected["steps"][0]
            if "skip_zero_advantage" not in saving
            else ("train/loss", "train/pg_loss", "train/grad_norm")
        )
        for name in names:
            assert got["steps"][0][name] == pytest.approx(expected["steps"][0][name], abs=1e-5, rel=1e-4), name


def test_savings_read_fewer_tokens(model_dir):
    def read(**flags):
        result = gradient(model_dir, shard_of(CUTS["one"]), global_batch_size=9, **flags)[1]
        return result["rollout"]["perf/actor_train_read_tokens"]

    assert read() == sum(LENGTHS)
    assert read(share_prompts=True) == sum(PROMPTS) + sum(n - 1 for n in RESPONSES)
    assert read(skip_zero_advantage=True) == sum(LENGTHS) - sum(LENGTHS[3:6])


def test_reported_columns_do_not_depend_on_which_samples_a_rank_skips(model_dir):
    """Data ranks add up the same columns, though only one of them has a group without advantage."""
    columns = [
        set(
            gradient(model_dir, shard_of(CUTS["one"], rewards), skip_zero_advantage=True, global_batch_size=9)[1][
                "rollout"
            ]
        )
        for rewards in (WITH_AND_WITHOUT, [1.0] * 9)
    ]
    assert columns[0] == columns[1]


def test_shared_prompts_serve_reference_and_old_log_probs(model_dir):
    flags = dict(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.05, get_mismatch_metrics=True, global_batch_size=9)
    flags |= dict(data_pad_size_multiplier=8)
    reference, expected = gradient(model_dir, shard_of(CUTS["groups_cut"]), **flags)
    other, got = gradient(model_dir, shard_of(CUTS["groups_cut"]), share_prompts=True, **flags)
    assert_same(reference, other)
    for name in ("rollout/log_probs", "rollout/ref_log_probs"):
        assert got["rollout"][name] == pytest.approx(expected["rollout"][name], abs=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_other_metrics_are_means_over_the_computed_samples(model_dir, per_token):
    """With three samples skipped they equal those of a batch that holds the other six alone."""
    rest = [0, 1, 2, 6, 7, 8]
    whole = shard_of(CUTS["one"])
    whole["loss_masks"] = [torch.ones(n, dtype=torch.int32) for n in RESPONSES]
    whole["rollout_mask_sums"] = torch.tensor([float(n) for n in RESPONSES])
    alone = {k: [v[i] for i in rest] if isinstance(v, list) and len(v) == 9 else v for k, v in whole.items()}
    alone |= dict(micro_batch_indices=[list(range(6))], global_batch_sizes=[6])
    alone["rollout_mask_sums"] = whole["rollout_mask_sums"][rest]
    flags = dict(skip_zero_advantage=True, calculate_per_token_loss=per_token)
    _, got = gradient(model_dir, whole, global_batch_size=9, **flags)
    _, expected = gradient(model_dir, alone, global_batch_size=6, **flags)
    for name in ("train/entropy_loss", "train/train_rollout_logprob_abs_diff"):
        assert got["steps"][0][name] == pytest.approx(expected["steps"][0][name], rel=1e-5), name


def test_a_round_without_any_advantage_still_takes_its_step(model_dir):
    difference, result = gradient(
        model_dir,
        shard_of(CUTS["groups_cut"], [0.0] * 9),
        skip_zero_advantage=True,
        share_prompts=True,
        global_batch_size=9,
    )
    assert all(bool((d == 0).all()) for d in difference.values())
    assert result["steps"][0]["train/step_skipped"] == 0 and result["steps"][0]["train/loss"] == 0
