"""Log-probs and entropies of response tokens from logits, over tensor-parallel vocabulary shards; forward-only passes.

A critic's forward-only pass reads values at the same positions.

Invariants: temperature divides logits everywhere (old, reference and training alike); forward-only passes run in
evaluation mode and return one CPU-independent tensor per sample in shard order on the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from slime.algorithms.logprobs import KeptTokens, log_probs_and_entropy
from slime.backends.megatron_utils.context_parallel import whole_responses
from slime.backends.megatron_utils.data import MicroBatch, ShardBatches, pack
from slime.backends.megatron_utils.expert_routing import ExpertRouting
from slime.backends.megatron_utils.model_provider import forward_logits, unwrap
from slime.utils.process_groups import reduce_over

#: What the sampler kept: ids of each sample, and where those of each response token end.
TOP_P_COLUMNS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")


def response_log_probs(
    args,
    logits: torch.Tensor,
    batch: MicroBatch,
    data: dict,
    *,
    with_entropy: bool,
    entropy_grad: bool,
    replay: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (log_probs [N], entropy [N] or None) of the response tokens.

    Args:
        logits: [1, n, V / tp] of the positions in `batch.rows`. replay: restrict to the sampler's top-p record if any.
    """
    from megatron.core import parallel_state as mpu

    shards = mpu.get_tensor_model_parallel_world_size()
    start = mpu.get_tensor_model_parallel_rank() * logits.shape[2]
    logits = _without_padding(logits[0], args.vocab_size, start)
    reduce_max, reduce_sum = (None, None) if shards == 1 else _tensor_rank_reductions()
    log_probs, entropy = log_probs_and_entropy(
        logits,
        batch.targets,
        args.rollout_temperature,
        chunk_size=args.log_probs_chunk_size,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        keep=_kept(args, batch, data) if replay else None,
        vocab_start=start,
        reduce_max=reduce_max,
        reduce_sum=reduce_sum,
    )
    num_tokens = sum(batch.response_lengths)
    whole = whole_responses(log_probs, batch.own, num_tokens)
    return whole, None if entropy is None else whole_responses(entropy, batch.own, num_tokens)


def get_responses(
    logits: torch.Tensor,
    *,
    args,
    unconcat_tokens: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **_layout,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each sample (logits [L_i, V / tp] that predict the response, over the temperature; its tokens [L_i]), for custom losses.

    Args:
        logits: [1, T, V / tp] of all samples, one after another, as a custom loss gets them.
    """
    from megatron.core import parallel_state as mpu

    batch = whole_samples(unconcat_tokens, response_lengths, logits.device)
    rows = logits[0].index_select(0, batch.rows) / args.rollout_temperature
    first = mpu.get_tensor_model_parallel_rank() * rows.shape[1]
    padding = torch.arange(first, first + rows.shape[1], device=rows.device) >= args.vocab_size
    rows = rows.masked_fill(padding, torch.finfo(rows.dtype).min)  # kept: parts of one size say whose ids they are
    lengths = list(response_lengths)
    yield from zip(rows.split(lengths), batch.targets.split(lengths), strict=True)


def whole_samples(tokens: list[torch.Tensor], response_lengths: list[int], where: torch.device) -> MicroBatch:
    """Return the samples end to end, as a custom loss gets their logits."""
    return pack([t.to(where) for t in tokens], response_lengths, range(len(tokens)), 1, where)


def _without_padding(logits: torch.Tensor, vocab_size: int, start: int) -> torch.Tensor:
    """Give padded vocabulary rows no probability: engines do not have them."""
    real = vocab_size - start
    if real > 0:
        return logits[:, :real]
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool), torch.finfo(logits.dtype).min)


def _kept(args, batch: MicroBatch, data: dict) -> KeptTokens | None:
    if args.rollout_top_p == 1.0 or not batch.indices:
        return None
    for key in TOP_P_COLUMNS:
        if key not in data:
            raise ValueError(
                f"--rollout-top-p {args.rollout_top_p} trains on the sampler's kept tokens, but {key} is missing"
            )
    ids, offsets = (batch.column(data, name) for name in TOP_P_COLUMNS)
    return KeptTokens.join(ids, offsets, batch.own)


def _tensor_rank_reductions():
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    group = mpu.get_tensor_model_parallel_group()
    return reduce_over(group, dist.ReduceOp.MAX), reduce_over(group, dist.ReduceOp.SUM)


@torch.no_grad()
def log_prob_pass(
    args, model: list, batches: ShardBatches, *, with_entropy: bool = False, routing: ExpertRouting | None = None
) -> dict[str, list[torch.Tensor]]:
    """Run the model forward over the whole shard.

    Args:
        routing: of the model, when its experts are to be recorded or replayed.
    Returns: {"log_probs": [one [L_i] tensor per sample], and "entropy" when asked for} on the last stage, {} elsewhere.
    """

    def read(batch: MicroBatch, logits: torch.Tensor) -> tuple:
        return response_log_probs(args, logits, batch, batches.data, with_entropy=with_entropy, entropy_grad=False)

    names = ("log_probs", "entropy") if with_entropy else ("log_probs",)
    return _forward_pass(args, model, batches, names, read, routing)


@torch.no_grad()
def value_pass(args, model: list, batches: ShardBatches) -> dict[str, list[torch.Tensor]]:
    """Run a critic forward over the whole shard; returns {"values": [one [L_i] tensor per sample]} on the last stage."""

    def read(batch: MicroBatch, output: torch.Tensor) -> tuple:
        return (whole_responses(output[0, :, 0], batch.own, sum(batch.response_lengths)),)

    return _forward_pass(args, model, batches, ("values",), read)


def _forward_pass(
    args, model: list, batches: ShardBatches, names: tuple[str, ...], read, routing=None
) -> dict[str, list]:
    """Return one column per name; `read(micro-batch, output [1, N, ...])` gives a flat [N] tensor for each, or None."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    keep = routing is not None and routing.keeps_micro_batches
    work = batches.make(batches.data["micro_batch_indices"] if keep else _pass_indices(args, batches.data))

    def forward_step(iterator, chunk):
        batch = next(iterator)
        with nullcontext() if routing is None else routing.old_policy(batch, batches.data):
            output = forward_logits(chunk, batch.tokens, batch.positions, batch.packed, batch.rows)
        return output, lambda output, non_loss_data: (batch, read(batch, output))

    for chunk in model:
        chunk.eval()
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(work) for _ in model],
        model=model,
        num_microbatches=len(work),
        seq_length=args.seq_length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    for chunk in model:
        chunk.train()
    if not mpu.is_pipeline_last_stage():
        return {}
    return _in_shard_order(results, len(batches.data["tokens"]), names)


def _pass_indices(args, data: dict) -> list[list[int]]:
    """Return the micro-batches of a forward-only pass: those of training, or larger ones if a cap for passes is set.

    Virtual pipelines and expert ranks need the number of micro-batches of training: a multiple of the stages, and equal
    on all data ranks.
    """
    from slime.batching.schedule import first_fit

    cap = args.log_probs_max_tokens_per_gpu
    experts_meet = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1) > 1
    needs_number = args.virtual_pipeline_model_parallel_size is not None or experts_meet
    if cap is None or not args.use_dynamic_batch_size or needs_number:
        return data["micro_batch_indices"]
    return first_fit([len(t) for t in data["tokens"]], cap * args.context_parallel_size)


def _in_shard_order(results: list, num_samples: int, names: tuple[str, ...]) -> dict[str, list[torch.Tensor]]:
    columns = {name: [None] * num_samples for name in names}
    for batch, values in results:
        for name, flat in zip(names, values, strict=False):
            for i, row in zip(batch.indices, flat.split(batch.response_lengths), strict=True):
                columns[name][i] = row
    for name, column in columns.items():
        missing = [i for i, row in enumerate(column) if row is None]
        assert not missing, f"{name} pass left out samples {missing[:5]}"
    return columns


def is_last_stage(model: list) -> bool:
    """Return whether this rank holds the output layer."""
    return unwrap(model[-1]).post_process
