"""The formulas under the names and signatures that users' functions import."""

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean, slice_log_prob_with_cp
from slime.utils import ppo_utils

KL = [torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4])]
MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1])]


def test_log_probs_and_entropies_are_those_of_the_softmax_with_gradient():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens = torch.tensor([0, 3, 6, 2, 2])
    log_probs, entropy = ppo_utils.calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True)
    table = logits.log_softmax(-1)
    assert torch.allclose(log_probs, table.gather(1, tokens[:, None])) and log_probs.shape == (5, 1)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1))
    assert torch.equal(ppo_utils.compute_log_probs(logits, tokens), log_probs)
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.abs().sum() > 0


def test_kl_takes_the_ratio_itself():
    new, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    plain = ppo_utils.compute_approx_kl(new, old, "k3")
    assert torch.allclose(plain, torch.exp(old - new) - 1 + new - old)
    assert torch.allclose(
        ppo_utils.compute_approx_kl(new, old, "k3", torch.tensor([2.0, 0.5])), plain * torch.tensor([2.0, 0.5])
    )


def test_returns_by_estimator():
    rewards = torch.tensor([1.0, -1.0])
    assert [row.tolist() for row in ppo_utils.get_grpo_returns(rewards, KL)] == [[1.0, 1.0, 1.0], [-1.0]]
    found = ppo_utils.get_reinforce_plus_plus_returns(rewards, KL, MASKS, [3, 1], [5, 2], kl_coef=0.5, gamma=1.0)
    assert torch.allclose(found[0], torch.tensor([0.85, 0.9, 0.0])) and torch.allclose(found[1], torch.tensor([-1.2]))
    found = ppo_utils.get_reinforce_plus_plus_baseline_advantages(rewards, KL, MASKS, 0.5)
    assert torch.allclose(found[0], torch.tensor([0.95, 0.9, 0.85]))
    advantages, returns = ppo_utils.get_advantages_and_returns(
        3, 2, torch.tensor([0.5, 0.25]), torch.tensor([0.0, 1.0]), 1.0, 1.0
    )
    assert advantages.tolist() == [0.5, 0.75] and returns.tolist() == [1.0, 1.0]
    many = ppo_utils.get_advantages_and_returns_batch(
        [3], [2], [torch.tensor([0.5, 0.25])], [torch.tensor([0.0, 1.0])], 1.0, 1.0
    )
    assert torch.equal(many[0][0], advantages)
    rows = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    for function in (ppo_utils.vanilla_gae, ppo_utils.chunked_gae):
        found = function(*rows, 1.0, 1.0)
        assert torch.equal(found[0], torch.stack([advantages] * 2)) and torch.equal(
            found[1], torch.stack([returns] * 2)
        )


def test_sequence_ratio_and_mask():
    new, old = [torch.zeros(3), torch.zeros(1)], [torch.full((3,), 0.3), torch.full((1,), -0.2)]
    flat = ppo_utils.compute_gspo_kl(new, old, new, MASKS)
    assert torch.allclose(flat, torch.tensor([0.3, 0.3, 0.3, -0.2]))

    class Args:
        opsm_delta = 0.1

    keep, dropped = ppo_utils.compute_opsm_mask(Args, new, old, [-torch.ones(3), -torch.ones(1)], MASKS)
    assert keep.tolist() == [0.0, 0.0, 0.0, 1.0] and dropped.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("per_token, expected", [(False, 1.5 + 4.0), (True, 1.0 + 2.0 + 4.0)])
def test_sum_of_sample_means(per_token, expected):
    reduce = get_sum_of_sample_mean([5, 3], [3, 1], MASKS, per_token)
    assert reduce(torch.tensor([1.0, 2.0, 3.0, 4.0])).item() == pytest.approx(expected)
    assert slice_log_prob_with_cp(KL[0], 5, 3) is KL[0]


def test_whitening_over_one_rank_and_the_group_for_objects(tmp_path):
    import torch.distributed as dist

    from slime.utils.distributed_utils import distributed_masked_whitening, get_gloo_group, init_gloo_group

    with pytest.raises(RuntimeError, match="get_gloo_group: only train ranks"):
        get_gloo_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert init_gloo_group() is get_gloo_group() is dist.group.WORLD
        values, mask = torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
        assert distributed_masked_whitening(values, mask).tolist()[:3] == pytest.approx([-1, 0, 1])
        kept = distributed_masked_whitening(values, mask, process_group=get_gloo_group(), shift_mean=False)
        assert kept.tolist()[:3] == pytest.approx([1, 2, 3])
    finally:
        dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="get_gloo_group"):
        get_gloo_group()


def test_what_is_cut_by_the_offsets_of_a_response_is_the_whole_of_it():
    from slime.backends.megatron_utils.cp_utils import get_logits_and_tokens_offset_with_cp

    tokens, mask = list(range(7)), list(range(2, 7))
    _, _, logits, places = get_logits_and_tokens_offset_with_cp(7, 5)
    assert [tokens[i] for start, stop in places for i in range(start, stop)] == mask
    assert [i for start, stop in logits for i in range(start, stop)] == [1, 2, 3, 4, 5]
    assert sum((mask[start - 2 : stop - 2] for start, stop in places), []) == mask
