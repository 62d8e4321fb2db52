"""Known faults of implementations of these algorithms, D1 to D9, each with a test that the fault is not here.

D5 and D9 need a trainer: tests/unit/megatron/test_spec_defects.py.
"""

from __future__ import annotations

import pytest
import torch

from slime.algorithms import advantages, mis, policy_loss, reduce, rewards, whitening
from slime.algorithms.advantages import AdvantageInputs
from slime.batching.context_parallel import merge_response, slice_response


@pytest.mark.parametrize("total, response, cp", [(9, 8, 2), (9, 5, 2), (225, 200, 8), (4, 1, 2), (17, 16, 4)])
def test_d1_outcome_reward_lands_on_the_last_token_under_context_parallelism(total, response, cp):
    """Values arrive as zigzag parts; PPO runs on the gathered response, and the parts of its result fit the ranks."""
    values = torch.linspace(-1, 1, response)
    parts = [slice_response(values, total, response, cp, rank) for rank in range(cp)]
    gathered = merge_response(parts, total, response)
    assert torch.equal(gathered, values)
    inputs = AdvantageInputs([3.0], [response], [torch.ones(response)], values=[gathered])
    expected = torch.zeros(response)
    expected[-1] = 3.0
    assert torch.equal(advantages.ppo_token_rewards(inputs)[0], expected)
    result = advantages.compute("ppo", inputs)[0][0]
    again = merge_response([slice_response(result, total, response, cp, rank) for rank in range(cp)], total, response)
    assert torch.equal(again, result)


@pytest.mark.parametrize("base", [100.0, 1000.0, 3e4])
def test_d2_whitening_survives_a_large_common_offset(base):
    noise = torch.linspace(-1e-3, 1e-3, 101, dtype=torch.float64)
    rows = [(base + noise).to(torch.float64)]
    out = whitening.whiten(rows, [torch.ones(101)], eps=0.0)[0]
    assert float(out.mean()) == pytest.approx(0, abs=1e-3)
    assert float(out.std()) == pytest.approx(1, rel=1e-3)
    single = whitening.whiten([rows[0].float()], [torch.ones(101)])[0]
    assert bool(torch.isfinite(single).all())


def test_d3_returns_that_the_critic_learns_contain_the_kl_penalty():
    """Advantages and returns come from one computation, so actor and critic cannot disagree about the token rewards."""
    kl, values = [torch.tensor([0.1, 0.2, 0.3])], [torch.tensor([5.0, -1.0, 0.5])]
    inputs = AdvantageInputs([1.0], [3], [torch.ones(3)], kl=kl, values=values, kl_coef=1.0)
    adv, returns = advantages.compute("ppo", inputs)
    torch.testing.assert_close(returns[0], torch.tensor([1 - 0.6, 1 - 0.5, 1 - 0.3]))
    torch.testing.assert_close(adv[0], returns[0] - values[0])


@pytest.mark.parametrize("name", sorted(set(advantages.ESTIMATORS) - {"ppo"}))
def test_d4_estimators_need_response_lengths_only(name):
    result = advantages.compute(name, AdvantageInputs([2.0, -1.0], [3, 2], [torch.ones(3), torch.ones(2)]))
    assert [len(row) for row in result[0]] == [3, 2]


def test_d6_uneven_groups_are_normalised_each_by_itself():
    out = rewards.normalize_group_rewards([1, 0, 5, 5, 5], [0, 0, 1, 1, 1], std_norm=False)
    assert out == [0.5, -0.5, 0.0, 0.0, 0.0]


def test_d7_opsm_fraction_is_a_masked_share_of_tokens():
    """Two samples of 4 and 2 tokens, the first dropped, one of its tokens masked: 3 of 5 trained tokens."""
    masks = [torch.tensor([1, 1, 1, 0]), torch.tensor([1, 1])]
    rows = [torch.full((4,), -1.0), torch.full((2,), -1.0)]
    _, dropped = policy_loss.opsm(torch.tensor([0.5, 0.0]), rows, delta=1e-4)
    per_token = reduce.make_reducer(masks, per_token=True)(dropped) / reduce.num_tokens(masks)
    assert per_token.item() == pytest.approx(3 / 5)
    per_rollout = reduce.make_reducer(masks, [3.0, 2.0])(dropped) / 2
    assert per_rollout.item() == pytest.approx(1 / 2)


def test_d8_rejected_tokens_leave_the_numerator_and_stay_in_the_denominator():
    train, rollout = [torch.tensor([-1.0, -1.0, -9.0, -1.0])], [torch.full((4,), -1.0)]
    masks = [torch.ones(4)]
    out = mis.compute_mis(train, rollout, masks, mis.MisConfig(use_tis=False, use_rs=True))
    assert out.response_masks[0].tolist() == [1, 1, 0, 1]
    sums = reduce.rollout_mask_sums([4], [0])
    assert reduce.make_reducer(out.response_masks, sums)(torch.ones(4)).item() == pytest.approx(3 / 4)
