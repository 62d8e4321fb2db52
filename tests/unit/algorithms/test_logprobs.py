"""Log-probs and entropy against plain autograd, over chunks, shards, dtypes and keep masks."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms.logprobs import KeptTokens, flat_targets, log_probs_and_entropy


def record_of(keep: torch.Tensor) -> KeptTokens:
    """The record of a keep mask [T, V]; it says nothing of rows that keep nothing."""
    return KeptTokens.join([keep.nonzero()[:, 1].int()], [torch.tensor([0, *keep.sum(1).cumsum(0).tolist()])])


def reference(logits, targets, temperature=1.0, keep=None):
    z = logits / temperature
    entropy = torch.distributions.Categorical(logits=z).entropy()
    if keep is not None:
        keep = keep | ~keep.any(1, keepdim=True)
        kept = keep.scatter(1, targets[:, None], True)
        z = z.masked_fill(~kept, float("-inf"))
    return torch.log_softmax(z, dim=-1).gather(1, targets[:, None])[:, 0], entropy


@pytest.fixture
def batch():
    torch.manual_seed(0)
    keep = torch.rand(7, 11) < 0.4
    keep[3] = False
    return torch.randn(7, 11, dtype=torch.float64) * 3, torch.randint(0, 11, (7,)), keep


@pytest.mark.parametrize("chunk_size", [-1, 1, 3, 100])
@pytest.mark.parametrize("use_keep", [False, True])
def test_values_and_gradients_equal_plain_autograd(batch, chunk_size, use_keep):
    logits, targets, keep = batch
    keep = keep if use_keep else None
    weights = torch.randn(7, dtype=torch.float64)
    results = []
    for function in (reference, log_probs_and_entropy):
        z = logits.clone().requires_grad_()
        kwargs = {} if function is reference else {"chunk_size": chunk_size, "with_entropy": True, "entropy_grad": True}
        kept = keep if function is reference or keep is None else record_of(keep)
        log_probs, entropy = function(z, targets, 0.7, keep=kept, **kwargs)
        (log_probs @ weights + entropy @ weights.flip(0)).backward()
        results.append((log_probs.detach(), entropy.detach(), z.grad))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_two_vocabulary_shards_equal_one(batch):
    logits, targets, keep = batch
    weights = torch.randn(7, dtype=torch.float64)

    def run_shards():
        """Run both shards in lockstep threads with a tiny all-reduce."""
        import threading

        barrier, box, out = threading.Barrier(2, timeout=60), {}, {}

        def collective(rank, combine):
            def reduce(x):
                box[rank] = x
                barrier.wait()
                result = combine(box[0], box[1])
                barrier.wait()
                return result

            return reduce

        def work(rank, start, end):
            z = logits[:, start:end].clone().requires_grad_()
            log_probs, entropy = log_probs_and_entropy(
                z, targets, with_entropy=True, entropy_grad=True, keep=record_of(keep), vocab_start=start,
                reduce_max=collective(rank, torch.maximum), reduce_sum=collective(rank, torch.add),
            )  # fmt: skip
            (log_probs @ weights + entropy @ weights).backward()
            out[rank] = log_probs.detach(), entropy.detach(), z.grad

        threads = [threading.Thread(target=work, args=(0, 0, 6)), threading.Thread(target=work, args=(1, 6, 11))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return out

    shards = run_shards()
    z = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(z, targets, with_entropy=True, entropy_grad=True, keep=record_of(keep))
    (log_probs @ weights + entropy @ weights).backward()
    for rank in (0, 1):
        torch.testing.assert_close(shards[rank][0], log_probs.detach())
        torch.testing.assert_close(shards[rank][1], entropy.detach())
    torch.testing.assert_close(torch.cat([shards[0][2], shards[1][2]], dim=1), z.grad)


def test_entropy_without_gradient_is_a_metric(batch):
    logits, targets, _ = batch
    z = logits.clone().requires_grad_()
    _, entropy = log_probs_and_entropy(z, targets, with_entropy=True)
    assert not entropy.requires_grad


def test_bfloat16_logits_give_float32_results_and_bfloat16_gradient():
    logits = torch.randn(4, 9).bfloat16().requires_grad_()
    log_probs, _ = log_probs_and_entropy(logits, torch.tensor([0, 3, 8, 1]))
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16


def test_padded_vocabulary_of_minus_infinity_is_harmless(batch):
    logits, targets, _ = batch
    z = torch.cat([logits, torch.full((7, 2), float("-inf"), dtype=torch.float64)], dim=1).requires_grad_()
    log_probs, entropy = log_probs_and_entropy(z, targets, with_entropy=True, entropy_grad=True)
    (log_probs + entropy).sum().backward()
    expected = reference(logits, targets)
    torch.testing.assert_close(log_probs.detach(), expected[0])
    torch.testing.assert_close(entropy.detach(), expected[1])
    assert torch.isfinite(z.grad).all()


def test_empty_input_gives_empty_output():
    log_probs, entropy = log_probs_and_entropy(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)


def test_fb_l18_temperature_divides_logits_and_zero_is_refused():
    log_probs, _ = log_probs_and_entropy(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5)
    assert log_probs.item() == pytest.approx(-0.01815, abs=1e-5)
    with pytest.raises(ValueError, match="rollout-temperature"):
        log_probs_and_entropy(torch.zeros(1, 2), torch.tensor([0]), 0.0)


def test_kept_tokens_of_a_shard_of_a_row_without_record_and_of_chosen_rows():
    ids, offsets = [torch.tensor([1, 4, 5]), torch.tensor([3])], [torch.tensor([0, 3, 3]), torch.tensor([0, 1])]
    kept = KeptTokens.join(ids, offsets)
    first, free, second = [False, True, True], [True, True, True], [True, False, False]
    assert kept.mask(slice(0, 3), vocab=3, vocab_start=3).tolist() == [first, free, second]
    assert kept.mask(slice(2, 9), vocab=3, vocab_start=3).tolist() == [second]
    some = KeptTokens.join(ids, offsets, rows=torch.tensor([2, 1, 0]))
    assert some.mask(slice(0, 3), vocab=3, vocab_start=3).tolist() == [second, free, first]
    none = KeptTokens.join(ids, offsets, rows=torch.tensor([], dtype=torch.long))
    assert none.mask(slice(0, 1), vocab=3).shape == (0, 3)
    with pytest.raises(ValueError, match="offsets"):
        KeptTokens.join([torch.tensor([1])], [torch.tensor([0, 2])])


def test_flat_targets_shift_inside_each_sample():
    assert flat_targets([torch.tensor([1, 2, 3]), torch.tensor([7, 8])]).tolist() == [2, 3, 0, 8, 0]
