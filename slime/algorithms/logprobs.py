"""Log-probabilities and entropies of given tokens under given logits, row-chunked and vocab-parallel aware.

`log_probs_and_entropy(logits [T, V], targets [T], ...)` pairs row t with target t; shifting targets by one is the
caller's business. One pass per row block: logsumexp and a gather. Backward uses the closed forms
    d logp / dz = onehot - p          dH / dz_j = p_j * (sum_k p_k z_k - z_j)
so nothing of size [T, V] is kept but the logits themselves, and only the gradient is allocated.

Under tensor parallelism each rank passes its vocabulary shard, `vocab_start`, and collectives over the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slime.algorithms.numeric import identity

Reduce = Callable[[torch.Tensor], torch.Tensor]

BLOCK_ELEMENTS = 1 << 22
"""Rows per block are chosen so that a block's temporaries stay near 16 MB of float32."""


@dataclass(frozen=True)
class KeptTokens:
    """Which ids the sampler kept for each of T rows (top-p replay): row r owns `ids[offsets[r]:offsets[r + 1]]`.

    A row without ids has no record and is unrestricted. ids: [K] int, global vocabulary; offsets: [T + 1] int64.
    """

    ids: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def join(
        cls, ids: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], rows: torch.Tensor | None = None
    ) -> KeptTokens:
        """Put the records of samples one after another, and take the given rows of the result (None: all).

        Raises:
            ValueError: offsets do not run from 0 to the number of ids.
        """
        for one, ends in zip(ids, offsets, strict=True):
            if int(ends[0]) != 0 or int(ends[-1]) != len(one):
                raise ValueError(
                    f"rollout_top_p_token_offsets must run from 0 to {len(one)} (number of ids), "
                    f"got {int(ends[0])}..{int(ends[-1])}"
                )
        flat, counts = torch.cat(list(ids)), torch.cat([ends.diff() for ends in offsets]).long()
        if rows is not None:
            starts = (counts.cumsum(0) - counts)[rows]
            counts = counts[rows]
            shift = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts)
            flat = flat[shift + torch.arange(len(shift), device=flat.device)]
        return cls(flat, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))

    def mask(self, block: slice, vocab: int, vocab_start: int = 0) -> torch.Tensor:
        """Return [rows of the block, vocab] bool: what of this vocabulary shard may be sampled.

        >>> KeptTokens(torch.tensor([0, 2]), torch.tensor([0, 2, 2])).mask(slice(0, 2), vocab=3).tolist()
        [[True, False, True], [True, True, True]]
        """
        offsets = self.offsets[block.start : block.stop + 1]
        counts = offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        local, owned = _local_targets(self.ids[offsets[0] : offsets[-1]].long(), vocab_start, vocab)
        mask = (counts == 0)[:, None].repeat(1, vocab)
        mask[rows[owned], local[owned]] = True
        return mask


@dataclass(frozen=True)
class _Plan:
    """Settings of one call, handed through autograd as one object."""

    temperature: float
    rows_per_block: int
    with_entropy: bool
    entropy_grad: bool
    vocab_start: int
    reduce_max: Reduce
    reduce_sum: Reduce


def log_probs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    keep: KeptTokens | None = None,
    vocab_start: int = 0,
    reduce_max: Reduce | None = None,
    reduce_sum: Reduce | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (log_probs [T], entropy [T] or None), float32 (float64 for float64 logits).

    Args:
        logits: [T, V_local], any float dtype; converted block by block.
        targets: [T] int64, global vocabulary ids.
        temperature: > 0; logits are divided by it before anything else.
        chunk_size: rows per block; -1 picks a block that fits in cache (one block under tensor parallelism, so that
            the number of collectives does not grow). The result does not depend on it.
        with_entropy: also return the entropy over the full vocabulary.
        entropy_grad: let gradient flow through the entropy; otherwise it is a metric.
        keep: the sampler's kept set per row: the log-softmax is restricted to it. The target is always kept. Entropy
            ignores it.
        vocab_start: first vocabulary id of this shard.
        reduce_max, reduce_sum: collectives over the vocabulary shards, None on one shard. No gradient passes them.
    Raises:
        ValueError: temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"--rollout-temperature must be > 0 for training, got {temperature}")
    num_rows, vocab = logits.shape
    if chunk_size > 0:
        rows = chunk_size
    else:
        rows = max(1, num_rows if reduce_sum else BLOCK_ELEMENTS // max(vocab, 1))
    plan = _Plan(
        float(temperature), rows, with_entropy, entropy_grad and with_entropy, vocab_start,
        reduce_max or identity, reduce_sum or identity,
    )  # fmt: skip
    log_probs, entropy = _LogProbs.apply(logits, targets, keep, plan)
    if not with_entropy:
        return log_probs, None
    return log_probs, entropy if entropy_grad else entropy.detach()


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, keep, plan):
        num_rows = logits.shape[0]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probs, lse, full_lse, mean_logit = (logits.new_zeros(num_rows, dtype=dtype) for _ in range(4))
        scratch = logits.new_empty(min(num_rows, plan.rows_per_block), logits.shape[1], dtype=dtype)
        for start in range(0, num_rows, plan.rows_per_block):
            block = slice(start, start + plan.rows_per_block)
            z = _scaled(logits[block], plan.temperature)
            local, owned = _local_targets(targets[block], plan.vocab_start, z.shape[1])
            target_logit = z.gather(1, local[:, None])[:, 0].masked_fill(~owned, 0.0)
            full_lse[block], mean_logit[block] = _logsumexp_and_mean(z, plan, plan.with_entropy, scratch)
            lse[block] = full_lse[block]
            if keep is not None:
                kept = z.masked_fill(
                    _dropped(keep.mask(block, z.shape[1], plan.vocab_start), local, owned), float("-inf")
                )
                lse[block], _ = _logsumexp_and_mean(kept, plan, False, scratch)
            log_probs[block] = plan.reduce_sum(target_logit) - lse[block]
        ctx.save_for_backward(logits, targets, lse, full_lse, mean_logit)
        ctx.keep, ctx.plan = keep, plan
        return log_probs, full_lse - mean_logit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, targets, lse, full_lse, mean_logit = ctx.saved_tensors
        keep, plan = ctx.keep, ctx.plan
        grad = torch.empty_like(logits)
        for start in range(0, logits.shape[0], plan.rows_per_block):
            block = slice(start, start + plan.rows_per_block)
            z = _scaled(logits[block], plan.temperature)
            local, owned = _local_targets(targets[block], plan.vocab_start, z.shape[1])
            g = (grad_log_probs[block] / plan.temperature).to(z.dtype)
            same = grad.dtype == z.dtype  # then the gradient is made where it belongs
            out = torch.sub(z, lse[block, None], out=grad[block] if same else torch.empty_like(z)).exp_()
            if keep is not None:
                out.masked_fill_(_dropped(keep.mask(block, z.shape[1], plan.vocab_start), local, owned), 0.0)
            out.mul_(-g[:, None])
            out.scatter_add_(1, local[:, None], (g * owned)[:, None])
            if plan.entropy_grad:
                p = torch.exp(z - full_lse[block, None])
                slope = _without_nan(p.mul_(mean_logit[block, None] - z))
                out.addcmul_(slope, (grad_entropy[block] / plan.temperature).to(z.dtype)[:, None])
            if not same:
                grad[block] = out
        return grad, None, None, None


def _scaled(block: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the block in working precision divided by the temperature; a view when neither changes anything."""
    z = block if block.dtype == torch.float64 else block.float()
    return z if temperature == 1.0 else z / temperature


def _local_targets(targets: torch.Tensor, vocab_start: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids within this shard, clamped; whether this shard owns them)."""
    local = targets - vocab_start
    owned = (local >= 0) & (local < vocab)
    return local.clamp(0, vocab - 1), owned


def _dropped(keep: torch.Tensor, local: torch.Tensor, owned: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a keep mask with each row's own target added; in place."""
    keep.scatter_(1, local[:, None], keep.gather(1, local[:, None]) | owned[:, None])
    return keep.logical_not_()


def _logsumexp_and_mean(
    z: torch.Tensor, plan: _Plan, with_mean: bool, scratch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logsumexp, sum of p*z) per row from one pass of exp; the second is 0 when not asked for.

    Logits of minus infinity contribute 0. `scratch` [at least the rows of z, V] is overwritten.
    """
    top = plan.reduce_max(z.amax(dim=1))
    weights = torch.sub(z, top[:, None], out=scratch[: z.shape[0]]).exp_()
    total = weights.sum(dim=1)
    if not with_mean:
        return top + torch.log(plan.reduce_sum(total)), torch.zeros_like(top)
    weighted = _without_nan(weights.mul_(z)).sum(dim=1)
    total, weighted = plan.reduce_sum(torch.stack([total, weighted])).unbind()
    return top + torch.log(total), weighted / total


def _without_nan(products: torch.Tensor) -> torch.Tensor:
    """Replace 0 * inf (a token without probability) by 0, in place; NaN logits still show in the logsumexp."""
    return products.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=float("-inf"))


def flat_targets(tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the targets of samples packed one after another: each sample shifted left by one, last position 0."""
    return torch.cat([torch.cat([row[1:], row.new_zeros(1)]) for row in tokens])
