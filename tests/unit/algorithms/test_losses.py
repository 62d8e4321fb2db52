"""Field cases of losses and advantages: finite, masked, detached, and equal for every layout."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms import advantages, kl, mis, off_policy, policy_loss, reduce, rewards, value_loss, whitening
from slime.algorithms.advantages import AdvantageInputs
from slime.algorithms.distill import apply_opd
from slime.algorithms.numeric import non_finite_rows


def clip(new, old, adv, estimator="grpo", **changes):
    new = [torch.tensor(new).requires_grad_()]
    rows = [torch.tensor(old)], [torch.tensor(adv)], [torch.ones(len(old))]
    options = {"eps_clip": 0.2, "eps_clip_high": 0.2, **changes}
    return new[0], policy_loss.policy_loss(estimator, new, *rows, **options)


def test_fb_l01_per_token_mode_counts_trained_tokens_only():
    masks = [torch.tensor([1, 1, 0, 0]), torch.tensor([1, 1, 1, 1])]
    total = reduce.make_reducer(masks, per_token=True)(torch.ones(8))
    assert reduce.num_tokens(masks) == 6 and total / reduce.num_tokens(masks) == 1.0


def test_fb_l02_groups_of_different_size_are_centred_by_index():
    out = rewards.normalize_group_rewards([1, 1, 0, 0, 0, 0, 0, 1, 1], [0] * 4 + [1] * 3 + [2] * 2, std_norm=False)
    assert out == [0.5, 0.5, -0.5, -0.5] + [0.0] * 5


def test_fb_l02_interleaved_groups_do_not_depend_on_position():
    out = rewards.normalize_group_rewards([1, 5, 0, 7], [0, 1, 0, 1], std_norm=False)
    assert out == [0.5, -1.0, -0.5, 1.0]


def test_fb_l03_fan_out_counts_once_and_siblings_must_agree():
    out = rewards.normalize_group_rewards([1, 1, 1, 0], [0] * 4, [5, 5, 5, 6], std_norm=False)
    assert out == [0.5, 0.5, 0.5, -0.5]
    with pytest.raises(ValueError, match="rows 0 and 2"):
        rewards.normalize_group_rewards([1, 1, 0, 0], [0] * 4, [5, 5, 5, 6], std_norm=False)


@pytest.mark.parametrize("value", [0.9, 0.1, 0.3, 0.6, 0.7])
def test_fb_l05_equal_rewards_give_exact_zeros(value):
    assert rewards.normalize_group_rewards([value] * 8, [0] * 8, std_norm=True) == [0.0] * 8


def test_fb_l05_rounding_noise_is_not_amplified():
    assert rewards.normalize_group_rewards([0.1 + 0.2, 0.3, 0.3], [0] * 3, std_norm=True) == [0.0] * 3


def test_fb_l15_a_group_of_one_gives_zero_never_nan():
    assert rewards.normalize_group_rewards([1.0], [0], std_norm=True) == [0.0]


def test_rloo_subtracts_the_mean_of_the_others():
    out = rewards.normalize_group_rewards([1, 0, 0], [0] * 3, std_norm=False, leave_one_out=True)
    assert out == pytest.approx([1.0, -0.5, -0.5])


def test_fb_l06_reinforce_plus_plus_ignores_kl_of_masked_tokens():
    inputs = AdvantageInputs([1.0], [3], [torch.tensor([1, 0, 1])], kl=[torch.tensor([0.1, 5.0, 0.1])], kl_coef=1.0)
    returns = advantages.compute("reinforce_plus_plus", inputs)[1][0]
    assert returns.tolist() == pytest.approx([0.8, 0.9, 0.9])


def test_fully_masked_sample_gets_zero_advantage():
    inputs = AdvantageInputs([1.0], [2], [torch.zeros(2)])
    assert advantages.compute("reinforce_plus_plus", inputs)[0][0].tolist() == [0.0, 0.0]


def test_fb_l08_the_logged_kl_stays_the_kl():
    row = torch.tensor([0.2, 0.2])
    for name in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        inputs = AdvantageInputs([1.0], [2], [torch.ones(2)], kl=[row], values=[torch.zeros(2)], kl_coef=0.1)
        advantages.compute(name, inputs)
        assert row.tolist() == pytest.approx([0.2, 0.2])


def test_estimators_need_no_log_probs_and_unknown_names_are_listed():
    adv, ret = advantages.compute("grpo", AdvantageInputs([2.0], [3], [torch.ones(3)]))
    assert adv[0].tolist() == ret[0].tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="grpo, gspo"):
        advantages.compute("nope", AdvantageInputs([], [], []))
    with pytest.raises(ValueError, match="critic values"):
        advantages.compute("ppo", AdvantageInputs([1.0], [1], [torch.ones(1)]))
    assert advantages.resolve("slime.algorithms.advantages.outcome") is advantages.outcome


@pytest.mark.parametrize("name", sorted(advantages.ESTIMATORS))
def test_empty_batches_and_empty_responses_pass(name):
    assert advantages.compute(name, AdvantageInputs([], [], [], values=[])) == ([], [])
    empty = torch.zeros(0)
    inputs = AdvantageInputs([1.0], [0], [empty], kl=[empty], values=[empty], kl_coef=0.5)
    assert advantages.compute(name, inputs)[0][0].shape == (0,)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_scan_equals_serial_recursion_for_any_length(discount, dtype, tolerance):
    from slime.algorithms.scan import discounted_returns

    for length in (0, 1, 127, 128, 129, 400):
        x = torch.randn(2, length, dtype=dtype, generator=torch.Generator().manual_seed(length))
        expected, carry = torch.zeros_like(x), torch.zeros(2, dtype=dtype)
        for position in reversed(range(length)):
            carry = x[:, position] + discount * carry
            expected[:, position] = carry
        torch.testing.assert_close(discounted_returns(x, discount), expected, rtol=tolerance, atol=tolerance * 10)


def test_fb_l09_dual_clip_bounds_negative_advantages_only():
    old, new = [0.0], [float(torch.log(torch.tensor(5.0)))]
    assert clip(new, old, [-1.0], eps_clip_c=3.0)[1].loss.item() == pytest.approx(3.0)
    assert clip(new, old, [-1.0])[1].loss.item() == pytest.approx(5.0)
    for bound in (None, 3.0):
        assert clip(new, old, [1.0], eps_clip_c=bound)[1].loss.item() == pytest.approx(-1.2)
    with pytest.raises(ValueError, match="--eps-clip-c"):
        clip(new, old, [1.0], eps_clip_c=1.0)


def test_fb_l10_kl_estimators_and_their_gradient():
    log_probs = torch.tensor([0.5]).requires_grad_()
    values = {kind: kl.approx_kl(log_probs, torch.zeros(1), kind) for kind in kl.KL_KINDS}
    assert values["k1"].item() == 0.5 and values["k2"].item() == 0.125
    assert values["k3"].item() == pytest.approx(0.106530, abs=1e-6) == values["low_var_kl"].item()
    values["k2"].sum().backward()
    assert log_probs.grad.item() == 0.5
    with pytest.raises(ValueError, match="--kl-loss-type"):
        kl.approx_kl(log_probs, log_probs, "k4")


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("old", [-1000.0, 1000.0, float("nan"), float("-inf")])
@pytest.mark.parametrize("adv", [-1.0, 1.0])
def test_fb_l11_huge_or_missing_old_log_probs_stay_finite(estimator, old, adv):
    new, out = clip([0.0, -1.0], [old, -1.0], [adv, adv], estimator)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all() and torch.isfinite(new.grad).all()
    values = kl.approx_kl(new, torch.tensor([-1000.0, 1000.0]), "k3")
    assert torch.isfinite(values).all()
    weights, _ = off_policy.tis_weights(new.detach(), torch.tensor([old, -1.0]), 0.0, 2.0)
    assert torch.isfinite(weights).all()


def test_fb_l11_the_damaged_sample_is_named():
    assert non_finite_rows([torch.tensor([0.0]), torch.tensor([float("nan")]), torch.tensor([])]) == [1]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_fb_l21_no_gradient_reaches_stored_tensors(estimator):
    old, adv, ref = (torch.tensor([-1.0, -2.0]).requires_grad_() for _ in range(3))
    new = torch.tensor([-1.1, -1.9]).requires_grad_()
    out = policy_loss.policy_loss(estimator, [new], [old], [adv], [torch.ones(2)], eps_clip=0.2, eps_clip_high=0.2)
    (out.loss.sum() + kl.approx_kl(new, ref, "k3").sum()).backward()
    assert new.grad is not None and old.grad is None and adv.grad is None and ref.grad is None
    distilled, _ = apply_opd([adv], [new], [ref], 1.0)
    assert not distilled[0].requires_grad
    loss, _ = value_loss.value_loss(new, old, adv, 0.2)
    loss.sum().backward()
    assert old.grad is None and adv.grad is None


def test_fb_l17_critic_values_ignore_the_temperature():
    assert value_loss.response_values(torch.tensor([2.0, 3.0]), 2, 1).tolist() == [2.0]


def test_gspo_split_over_two_ranks_equals_the_whole_sequence():
    new, old = torch.tensor([-0.5, -1.2, -0.8, -2.0]), torch.tensor([-0.7, -1.0, -1.1, -2.2])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    whole = policy_loss.sequence_kl([new], [old], [mask])
    first = torch.stack([((old - new) * mask)[:2].sum(), mask[:2].sum()])[None]
    second = policy_loss.sequence_kl([new[2:]], [old[2:]], [mask[2:]], reduce_sum=lambda sums: sums + first)
    torch.testing.assert_close(whole, second)


def test_masked_garbage_never_reaches_a_reduction():
    mask = torch.tensor([1.0, 0.0])
    x = torch.tensor([2.0, float("nan")]).requires_grad_()
    value = reduce.make_reducer([mask], [1.0])(x)
    value.backward()
    assert value.item() == 2.0 and x.grad.tolist() == [1.0, 0.0]


def test_splitting_a_rollout_over_micro_batches_does_not_change_the_sum():
    x = torch.arange(9.0)
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0])]
    sums = reduce.rollout_mask_sums([2, 3, 0], [0, 0, 1])
    whole = reduce.make_reducer(masks, sums)(x)
    parts = [(masks[:1], sums[:1], x[:3]), (masks[1:], sums[1:], x[3:])]
    assert sum(reduce.make_reducer(m, s)(part) for m, s, part in parts) == pytest.approx(whole.item())
    wrong = sum(reduce.make_reducer(m)(part) for m, _, part in parts)
    assert wrong != pytest.approx(whole.item()), "denominators per micro-batch must differ, or this test says nothing"


def test_empty_micro_batch_reduces_to_zero():
    assert reduce.make_reducer([])(torch.zeros(0)).item() == 0.0


def test_whitening_is_equal_for_every_layout_and_joins_with_no_tokens():
    torch.manual_seed(0)
    rows, masks = [torch.randn(n) * 3 + 100 for n in (4, 7, 2)], [torch.ones(n) for n in (4, 7, 2)]
    whole = whitening.whiten(rows, masks)
    calls = []

    def with_rest(rest_rows, rest_masks):
        """Stand for an all-reduce: replay the other ranks' contributions."""
        x, m = torch.cat(rest_rows).double(), torch.cat(rest_masks).double()

        def reduce_sum(value):
            calls.append(1)
            if value.numel() == 2:
                return value + torch.stack([(x * m).sum(), m.sum()])
            mean = torch.cat(rows).double().mean()
            return value + ((x - mean) ** 2 * m).sum()

        return reduce_sum

    part = whitening.whiten(rows[:1], masks[:1], with_rest(rows[1:], masks[1:]))
    torch.testing.assert_close(part[0], whole[0], rtol=1e-5, atol=1e-5)
    assert whitening.whiten([], [], with_rest(rows, masks)) == [] and len(calls) == 4
    with pytest.raises(ValueError, match="--normalize-advantages"):
        whitening.whiten(rows, [mask * 0 for mask in masks])


def test_opd_without_teacher_or_of_other_length_is_refused():
    row = torch.zeros(2)
    assert apply_opd([row], None, None, 1.0)[1] is None
    with pytest.raises(ValueError, match="teacher_log_probs"):
        apply_opd([row], [row], None, 1.0)
    with pytest.raises(ValueError, match="row 0 has 2 student and 1"):
        apply_opd([row], [row], [row[:1]], 1.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_mis_batch_normalisation_of_parts_is_that_of_the_whole(level):
    generator = torch.Generator().manual_seed(0)
    columns = [[torch.randn(n, generator=generator) for n in (3, 5, 1, 7)] for _ in range(2)]
    columns.append([torch.tensor(m) for m in ([1, 0, 1], [1] * 5, [0], [1] * 7)])
    config = mis.MisConfig(tis_level=level, tis_upper_bound=50.0, tis_batch_normalize=True)
    parts = [[column[part] for column in columns] for part in (slice(0, 1), slice(1, 3), slice(3, 4))]
    sums = [sum(values) for values in zip(*(mis.weight_sums(*part, config) for part in parts), strict=True)]
    whole = torch.cat(mis.compute_mis(*columns, config).weights)
    cut = torch.cat([row for part in parts for row in mis.compute_mis(*part, config, sums).weights])
    torch.testing.assert_close(cut, whole)
    alone = torch.cat([row for part in parts for row in mis.compute_mis(*part, config).weights])
    assert (alone - whole).abs().max() > 0.1


def test_mis_options_are_checked_and_masked_tokens_weigh_zero():
    for bad in ({"tis_level": "word"}, {"tis_mode": "cut"}, {"tis_level": "geometric", "tis_batch_normalize": True}):
        with pytest.raises(ValueError):
            mis.MisConfig(**bad)
    rows = [torch.tensor([-1.0, -2.0])]
    out = mis.compute_mis(rows, rows, [torch.tensor([1, 0])], mis.MisConfig(use_rs=True, rs_veto_threshold=1e-3))
    assert out.weights[0].tolist() == [1.0, 0.0] and out.response_masks[0].tolist() == [1.0, 0.0]
    assert all(len(row) == 2 for rows in out.metrics.values() for row in rows)


def test_custom_tis_functions_have_the_hook_shape():
    from types import SimpleNamespace

    from slime.algorithms.off_policy_hooks import icepop_function, mis_function, vanilla_tis_function

    args = SimpleNamespace(tis_clip=2.0, tis_clip_low=0.5, use_tis=True, tis_mode="mask", tis_upper_bound=2.0)
    call = dict(
        args=args, pg_loss=torch.ones(2), train_log_probs=[torch.tensor([0.0, 0.0])],
        rollout_log_probs=[torch.tensor([0.0, -5.0])], loss_masks=[torch.ones(2)], total_lengths=[4], response_lengths=[2],
    )  # fmt: skip
    assert vanilla_tis_function(**call)[0].tolist() == [1.0, 2.0]
    assert icepop_function(**call)[0].tolist() == [1.0, 0.0]
    _, masks, metrics = mis_function(**call)
    assert masks[0].tolist() == [1.0, 0.0] and all(name.startswith("mis_") for name in metrics)


def test_a_result_that_does_not_fit_the_samples_is_refused(tmp_path):
    (tmp_path / "own.py").write_text("def short(inputs):\n    return [], []\n")
    with pytest.raises(ValueError, match=r"own.py:short returned advantages of shapes \[\], the responses have \[2\]"):
        advantages.compute(f"{tmp_path}/own.py:short", AdvantageInputs([1.0], [2], [torch.ones(2)]))
