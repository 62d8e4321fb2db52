"""examples/hooks/loss.py: advantages and a loss on tensors, checked token by token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from slime.utils.misc import load_function

LOSS = Path(__file__).resolve().parents[3] / "examples" / "hooks" / "loss.py"


def test_advantages_fade_with_the_position():
    data = {"rewards": [2.0, -1.0], "loss_masks": [torch.ones(3), torch.ones(1)]}
    load_function(f"{LOSS}:early_tokens_count_more")(None, data)
    assert data["returns"] is data["advantages"]
    torch.testing.assert_close(data["advantages"][0], torch.tensor([2.0, 1.98, 1.9602]))
    assert data["advantages"][1].tolist() == [-1.0]


def test_reinforce_takes_the_log_prob_of_each_response_token_of_packed_samples():
    logits = torch.randn(1, 9, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    batch = {
        "tokens": [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8, 9])],
        "total_lengths": [4, 5],
        "response_lengths": [2, 3],
        "advantages": [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5, 3.0])],
    }
    loss, metrics = load_function(f"{LOSS}:reinforce")(SimpleNamespace(vocab_size=10), batch, logits, torch.sum)
    table = torch.log_softmax(logits[0, :, :10], dim=-1)  # columns 10 and 11 are padding of the vocabulary
    terms = [(1, 3, 1.0), (2, 4, 2.0), (5, 7, -1.0), (6, 8, 0.5), (7, 9, 3.0)]  # predicting row, token, advantage
    torch.testing.assert_close(loss, -sum(a * table[row, token] for row, token, a in terms))
    torch.testing.assert_close(metrics["entropy_of_sampled"], -sum(table[row, token] for row, token, _ in terms))
    loss.backward()
    assert logits.grad[0, :, 10:].abs().max() == 0


def test_own_estimator_fades_from_the_end_and_subtracts_the_kl():
    from slime.algorithms import advantages

    def rows(**options):
        inputs = advantages.AdvantageInputs([2.0, -1.0], [3, 1], [torch.ones(3), torch.ones(1)], **options)
        return advantages.compute(f"{LOSS.with_name('estimator.py')}:fading", inputs)[0]

    assert [row.tolist() for row in rows(gamma=0.5)] == [[0.5, 1.0, 2.0], [-1.0]]
    kl = [torch.tensor([0.5, 0.0, 0.0]), torch.tensor([1.0])]
    torch.testing.assert_close(torch.cat(rows(gamma=0.5, kl=kl, kl_coef=0.2)), torch.tensor([0.4, 1.0, 2.0, -1.2]))
