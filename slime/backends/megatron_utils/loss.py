"""The loss of one micro-batch: `loss_function_for(args, role)(args, batch, data, logits) -> LossOutput`, by `--loss-type`.

The numbers follow `slime.algorithms.reduce`: a loss is the plain sum S of its micro-batch; `scale_for_megatron` makes
the final gradient independent of how a step was cut into micro-batches and ranks. Metrics are sums with the same
denominators, divided once per step in `metrics.py`. Old log-probs, advantages and the like never get gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from slime.algorithms import kl as kl_module
from slime.algorithms import off_policy, policy_loss
from slime.algorithms.numeric import non_finite_rows
from slime.algorithms.off_policy_hooks import icepop_function, vanilla_tis_function
from slime.algorithms.reduce import make_reducer, num_tokens
from slime.algorithms.sft_loss import sft_loss
from slime.algorithms.value_loss import value_loss
from slime.backends.megatron_utils import hook_results
from slime.backends.megatron_utils.context_parallel import whole_responses, whole_stream
from slime.backends.megatron_utils.data import MicroBatch, pack
from slime.backends.megatron_utils.log_probs import TOP_P_COLUMNS, get_responses, response_log_probs, whole_samples
from slime.utils import device

#: What users' code finds here; the off-policy functions are those that --custom-tis-function-path may name.
__all__ = [
    "get_log_probs_and_entropy", "get_responses", "icepop_function", "policy_loss_function", "sft_loss_function",
    "vanilla_tis_function",
]  # fmt: skip

STEP_SUMS = "tis_step_sums"
"""Key of what `add_step_sums` leaves in the data for the micro-batches of the step."""


@dataclass
class LossOutput:
    """loss: S with gradient. metrics: detached sums. log_probs: [N], detached, None where the loss computes none."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    log_probs: torch.Tensor | None = None


def reducer_for(args, batch: MicroBatch, data: dict, masks: list[torch.Tensor] | None = None):
    """Return the reducer of a micro-batch; `masks` replace the numerator's, denominators stay those of the rollouts."""
    own = batch.column(data, "loss_masks")
    sums = data["rollout_mask_sums"][list(batch.indices)] if "rollout_mask_sums" in data else None
    if sums is None and masks is not None:
        sums = [float(mask.sum()) for mask in own]
    return make_reducer(own if masks is None else masks, sums, per_token=args.calculate_per_token_loss)


def pg_reducer_for(args, batch: MicroBatch, masks: list[torch.Tensor], default):
    """Return the reducer of the policy-gradient term: the user's, the one of dr_grpo, or the default one.

    dr_grpo divides every sample by one constant, the longest allowed response, instead of by its own length, which would
    weigh a token of a short response more.
    """
    if args.custom_pg_loss_reducer_function_path is None:
        if args.advantage_estimator != "dr_grpo" or args.calculate_per_token_loss:
            return default
        return make_reducer(masks, [float(args.rollout_max_response_len)] * len(masks))
    return hook_results.reducer(args, list(batch.total_lengths), list(batch.response_lengths), masks)


def policy_gradient(args, batch: MicroBatch, data: dict, logits: torch.Tensor, reducer=None) -> LossOutput:
    """Policy gradient with everything the flags add: dual clip, GSPO, CISPO, OPSM, TIS, entropy bonus, KL loss.

    Args:
        reducer: in place of the one of the flags.
    """
    entropy_grad = args.entropy_coef != 0
    log_probs, entropy = response_log_probs(args, logits, batch, data, with_entropy=True, entropy_grad=entropy_grad)
    rows = list(log_probs.split(batch.response_lengths))
    masks = batch.column(data, "loss_masks")
    old_rows = _old_log_probs(args, batch, data, rows)
    advantages = batch.column(data, "advantages")
    pg = policy_loss.policy_loss(
        args.advantage_estimator,
        rows,
        old_rows,
        advantages,
        masks,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
    )
    reducer = reducer or reducer_for(args, batch, data)
    metrics: dict[str, torch.Tensor] = {}
    pg_tokens = pg.loss
    if args.use_opsm:
        seq_kl = policy_loss.sequence_kl(rows, old_rows, masks)
        keep, dropped = policy_loss.opsm(seq_kl, advantages, args.opsm_delta)
        pg_tokens = pg_tokens * keep
        metrics["opsm_clipfrac"] = reducer(dropped)
    pg_tokens, pg_masks = _correct_mismatch(args, batch, data, pg_tokens, pg.ppo_kl, rows, metrics, reducer)
    if pg_masks is not None:
        reducer = reducer_for(args, batch, data, pg_masks)
    pg_loss = pg_reducer_for(args, batch, pg_masks or masks, reducer)(pg_tokens)
    entropy_loss = reducer(entropy)
    loss = pg_loss - args.entropy_coef * entropy_loss if entropy_grad else pg_loss
    if args.use_kl_loss:
        kl_loss = reducer(_kl_to_reference(args, batch, data, log_probs, old_rows))
        loss = loss + args.kl_loss_coef * kl_loss
        metrics["kl_loss"] = kl_loss
    if "opd_reverse_kl" in data:
        metrics["opd_reverse_kl"] = reducer_for(args, batch, data)(batch.flat(data, "opd_reverse_kl"))
    metrics.update(loss=loss, pg_loss=pg_loss, entropy_loss=entropy_loss)
    metrics.update(pg_clipfrac=reducer(pg.clipfrac), ppo_kl=reducer(pg.ppo_kl))
    if "rollout_log_probs" in data:
        trained = log_probs if args.use_rollout_logprobs else torch.cat(old_rows)
        gap = (trained - batch.flat(data, "rollout_log_probs")).abs()
        metrics["train_rollout_logprob_abs_diff"] = reducer_for(args, batch, data)(gap)
    return LossOutput(loss, {k: v.detach() for k, v in metrics.items()}, log_probs.detach())


def _old_log_probs(args, batch: MicroBatch, data: dict, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the behaviour side of the ratio; without stored ones it is the current policy itself (ratio 1)."""
    if args.use_rollout_logprobs:
        return batch.column(data, "rollout_log_probs")
    if "log_probs" in data:
        return batch.column(data, "log_probs")
    return [row.detach() for row in rows]


def _correct_mismatch(args, batch, data, pg_tokens, ppo_kl, rows, metrics, reducer):
    """Weigh token losses by train/rollout ratios, or only measure them; returns (token losses, new masks or None)."""
    if not (args.use_tis or args.get_mismatch_metrics):
        return pg_tokens, None
    _check_has_rollout_log_probs(data)
    metrics["ois"] = reducer(torch.exp(-ppo_kl))
    train_rows = batch.column(data, "log_probs") if "log_probs" in data else [row.detach() for row in rows]
    rollout_rows = batch.column(data, "rollout_log_probs")
    if args.custom_tis_function_path is None:
        weights, measured = off_policy.tis_weights(
            torch.cat(train_rows), torch.cat(rollout_rows), args.tis_clip_low, args.tis_clip
        )
        corrected, masks = pg_tokens * weights, None
    else:
        of_step = {"step_sums": data[STEP_SUMS]} if STEP_SUMS in data else {}
        corrected, masks, measured = hook_results.tis(
            args,
            pg_loss=pg_tokens,
            train_log_probs=train_rows,
            rollout_log_probs=rollout_rows,
            loss_masks=batch.column(data, "loss_masks"),
            total_lengths=list(batch.total_lengths),
            response_lengths=list(batch.response_lengths),
            **of_step,
        )
    metrics.update({name: reducer(value) for name, value in measured.items()})
    return (corrected, masks) if args.use_tis else (pg_tokens, None)


def _check_has_rollout_log_probs(data: dict) -> None:
    if "rollout_log_probs" not in data:
        raise ValueError("--use-tis and --get-mismatch-metrics need rollout_log_probs, which the rollout data lacks")


def add_step_sums(args, batches: list[MicroBatch], data: dict) -> None:
    """Sum what the TIS function wants over the samples of a step; all data ranks of the last stage call it."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    function = hook_results.step_sums_function(args)
    if function is None:
        return
    _check_has_rollout_log_probs(data)
    columns = [
        [row for batch in batches for row in batch.column(data, name)]
        for name in ("log_probs", "rollout_log_probs", "loss_masks")
    ]
    sums, group = hook_results.step_sums(args, function, columns).to(device.device()), mpu.get_data_parallel_group()
    hook_results.check_same_count(args, len(sums), group)
    dist.all_reduce(sums, group=group)
    data[STEP_SUMS] = tuple(sums.tolist())


def _kl_to_reference(args, batch, data, log_probs, old_rows) -> torch.Tensor:
    reference = batch.flat(data, "ref_log_probs")
    log_ratio = log_probs - torch.cat(old_rows).detach() if args.use_unbiased_kl else None
    return kl_module.approx_kl(log_probs, reference, args.kl_loss_type, log_ratio)


def likelihood(args, batch: MicroBatch, data: dict, logits: torch.Tensor, reducer=None) -> LossOutput:
    """Negative log-likelihood of the unmasked response tokens; the sampler's top-p record plays no part."""
    log_probs, _ = response_log_probs(args, logits, batch, data, with_entropy=False, entropy_grad=False, replay=False)
    loss = sft_loss(log_probs, reducer or reducer_for(args, batch, data))
    return LossOutput(loss, {"loss": loss.detach()}, log_probs.detach())


def value_regression(args, batch: MicroBatch, data: dict, outputs: torch.Tensor) -> LossOutput:
    """Clipped regression of the critic's values on the returns; no temperature."""
    values = whole_responses(outputs[0, :, 0], batch.own, sum(batch.response_lengths))
    tokens, clipped = value_loss(values, batch.flat(data, "values"), batch.flat(data, "returns"), args.value_clip)
    reducer = reducer_for(args, batch, data)
    loss = reducer(tokens)
    return LossOutput(loss, {"value_loss": loss.detach(), "value_clipfrac": reducer(clipped).detach()})


class SampleTokens(list):
    """Tokens of each sample; who takes them for the packed stream is told where that is."""

    def __getattr__(self, name: str):
        raise AttributeError(
            f"batch['tokens'] is a list of each sample's tokens and has no {name!r}; the packed stream [1, T] is batch['packed_tokens']"
        )


class LossBatch(dict):
    """What a custom loss sees of a micro-batch: columns by name, as lists of one entry per sample.

    Also `tokens` (and `unconcat_tokens`, the same), `packed_tokens` [1, T], `packed_seq_params`, `total_lengths` and
    `response_lengths`; where no prompt is shared, `full_loss_masks` [1, T] that are 1 where logits predict a trained token.
    `micro_batch` and `data` are for the losses that a custom one may build on.
    """

    def __init__(self, columns: dict, micro_batch: MicroBatch, data: dict):
        super().__init__(columns)
        self.micro_batch, self.data = micro_batch, data


_in_custom_loss: ContextVar[LossBatch | None] = ContextVar("slime_loss_batch", default=None)


@contextmanager
def _seen_by_custom_loss(batch: LossBatch) -> Iterator[None]:
    token = _in_custom_loss.set(batch)
    try:
        yield
    finally:
        _in_custom_loss.reset(token)


def custom_loss(args, batch: MicroBatch, data: dict, logits: torch.Tensor) -> LossOutput:
    """Call `--custom-loss-function-path` as (args, batch, logits, reducer) -> (loss, {name: tensor}).

    `logits` are those of the whole stream, [1, T, V / tp]; `batch` is a LossBatch. Context ranks put their parts together for
    it, so it sees the same on each of them.
    """
    tokens = [t.to(batch.tokens.device) for t in batch.column(data, "tokens")]
    stream, packed, whole = batch.tokens, batch.packed, batch
    if batch.own is not None:
        logits = whole_stream(logits, batch.total_lengths, packed.part)
        whole = pack(tokens, batch.response_lengths, batch.indices, 1, logits.device)
        stream, packed = whole.tokens, whole.packed
    columns = {
        key: batch.column(data, key)
        for key, value in data.items()
        if isinstance(value, list) and len(value) == len(data["tokens"])
    }
    columns.update(
        tokens=SampleTokens(tokens),
        unconcat_tokens=tokens,
        packed_tokens=stream,
        packed_seq_params=packed,
        total_lengths=list(batch.total_lengths),
        response_lengths=list(batch.response_lengths),
    )
    if packed.shared is None:
        full = torch.zeros_like(stream, dtype=torch.int32)
        full[0, whole.rows] = torch.cat(columns["loss_masks"]).to(full.dtype)
        columns["full_loss_masks"] = full
    own = LossBatch(columns, whole, data)
    with _seen_by_custom_loss(own):
        loss, metrics = hook_results.loss(args, own, logits, reducer_for(args, batch, data))
    return LossOutput(loss, metrics)


def policy_loss_function(args, batch: LossBatch, logits: torch.Tensor, sum_of_sample_mean) -> tuple:
    """The policy loss of the flags, for a custom loss that adds to it; arguments and results are those of a custom loss."""
    return _built_in(policy_gradient, args, batch, logits, sum_of_sample_mean)


def sft_loss_function(args, batch: LossBatch, logits: torch.Tensor, sum_of_sample_mean) -> tuple:
    """The negative log-likelihood, likewise."""
    return _built_in(likelihood, args, batch, logits, sum_of_sample_mean)


def _built_in(function, args, batch: LossBatch, logits: torch.Tensor, reducer) -> tuple[torch.Tensor, dict]:
    rows = logits.index_select(1, batch.micro_batch.rows)
    output = function(args, batch.micro_batch, batch.data, rows, reducer)
    return output.loss, output.metrics


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args,
    unconcat_tokens: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    **_layout,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Log-probs of the response tokens, for custom losses that compute them from the stream's logits.

    Args:
        logits: [1, T, V / tp] of all samples, one after another. The other arguments: of the samples, as a custom loss gets them.
        with_entropy: entropies too, with gradient.

    Returns:
        (an empty tensor, {"log_probs": [L_i] of each sample, "entropy": the same if asked for}). With --rollout-top-p the log-probs
        are those among the ids that the sampler kept, as everywhere else.

    Raises: ValueError when what the sampler kept is not known, since the tokens are not those that the custom loss was given.
    """
    whole = whole_samples(unconcat_tokens, response_lengths, logits.device)
    rows = logits.index_select(1, whole.rows)
    wanted = {"with_entropy": with_entropy, "entropy_grad": with_entropy}
    log_probs, entropy = response_log_probs(args, rows, whole, _records_of(args, unconcat_tokens), **wanted)
    columns = {"log_probs": list(log_probs.split(list(response_lengths)))}
    if entropy is not None:
        columns["entropy"] = list(entropy.split(list(response_lengths)))
    return logits.new_empty(0), columns


def _records_of(args, unconcat_tokens: list[torch.Tensor]) -> dict[str, list]:
    """The sampler's top-p records of samples of the running custom loss, which are told by their tensors of tokens."""
    if args.rollout_top_p == 1.0:
        return {}
    batch = _in_custom_loss.get() or {"tokens": ()}
    position_of = {id(tokens): position for position, tokens in enumerate(batch["tokens"])}
    positions = [position_of.get(id(tokens)) for tokens in unconcat_tokens]
    if None in positions:
        raise ValueError(
            f"--rollout-top-p {args.rollout_top_p}: get_log_probs_and_entropy needs the samples' tensors of batch['unconcat_tokens'] "
            "themselves, inside of a custom loss, to find what the sampler kept"
        )
    return {name: [batch[name][position] for position in positions] for name in TOP_P_COLUMNS if name in batch}


def loss_function_for(args, role: str):
    """Return the loss function of `--loss-type` (the critic always has the value loss)."""
    if role == "critic":
        return value_regression
    functions = {
        "policy_loss": policy_gradient,
        "sft_loss": likelihood,
        "custom_loss": custom_loss,
    }
    if args.loss_type not in functions:
        raise ValueError(f"--loss-type {args.loss_type!r} is unknown; choose one of {', '.join(functions)}")
    return functions[args.loss_type]


def token_count(args, batch: MicroBatch, data: dict) -> int:
    """Return the denominator that this micro-batch adds to the step: its tokens in per-token mode, else 1."""
    if not args.calculate_per_token_loss:
        return 1
    fillers = data.get("fillers", ())
    return num_tokens([data["loss_masks"][i] for i in (*batch.indices, *batch.skipped) if i not in fillers])


def scale_for_megatron(args, loss: torch.Tensor, num_micro_batches: int, global_batch_size: int, num_ranks: int):
    """Turn S into what Megatron's schedule and gradient reduction expect.

    They divide by the number of micro-batches and average over the data- and context-parallel ranks (or, in per-token mode,
    sum and divide by the token count of the step), so that the gradient becomes d(sum of S / G), or d(sum of S / N).
    """
    return loss if args.calculate_per_token_loss else loss * (num_micro_batches * num_ranks / global_batch_size)


def suspicious_samples(batch: MicroBatch, data: dict, log_probs: torch.Tensor | None) -> list[int]:
    """Return the `sample_indices` (or shard positions) of samples with a NaN or infinity in their numbers."""
    found: set[int] = set()
    for key in ("log_probs", "rollout_log_probs", "ref_log_probs", "values", "advantages", "returns"):
        if key in data:
            found.update(non_finite_rows(batch.column(data, key)))
    if log_probs is not None:
        found.update(non_finite_rows(log_probs.split(batch.response_lengths)))
    ids = data.get("sample_indices")
    return sorted(ids[batch.indices[i]] if ids is not None else batch.indices[i] for i in found)
