"""One optimizer step: forward and backward over its micro-batches, gradient check, update, schedule.

Invariants: the gradient does not depend on how the step is cut (see `loss.scale_for_megatron`); a step whose loss or
gradient is not finite on any rank changes neither parameters nor schedule on all of them, and names the samples.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from slime.backends.megatron_utils import loss as losses
from slime.backends.megatron_utils import metrics as metrics_module
from slime.backends.megatron_utils.data import MicroBatch
from slime.backends.megatron_utils.expert_routing import ExpertRouting
from slime.backends.megatron_utils.log_probs import is_last_stage
from slime.backends.megatron_utils.model_provider import forward_logits
from slime.observability.progress import Progress
from slime.observability.timer import Timers
from slime.utils import device
from slime.utils.hook_calls import call_hook

logger = logging.getLogger(__name__)


@dataclass
class StepReport:
    """metrics: without prefix, on the last stage. log_probs: {shard position: [L_i]} of the forward pass."""

    metrics: dict[str, float]
    skipped: bool
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)


class StepRunner:
    """Runs the optimizer steps of one model; holds what does not change between them."""

    def __init__(
        self,
        args,
        model: list,
        optimizer,
        scheduler,
        role: str,
        progress: Progress,
        timers: Timers,
        routing: ExpertRouting,
    ):
        self.args, self.model, self.optimizer, self.scheduler = args, model, optimizer, scheduler
        self.routing = routing
        self.role, self._progress, self._timers = role, progress, timers
        self.loss_function = losses.loss_function_for(args, role)
        # Megatron moves them with the gradients, before anyone knows whether the step is taken.
        self._expert_biases = [b for chunk in model for name, b in chunk.named_buffers() if "expert_bias" in name]
        self._reads_whole_stream = self.loss_function is losses.custom_loss

    def run(
        self, rollout_id: int, step_id: int, batches: list[MicroBatch], data: dict, global_batch_size: int
    ) -> StepReport:
        """Do one step over this rank's micro-batches; all ranks of the model call it together."""
        self._zero_grads()
        if self.args.custom_megatron_before_train_step_hook_path is not None:
            own = (self.args, rollout_id, step_id, self.model, self.optimizer, self.scheduler)
            call_hook(self.args, "custom_megatron_before_train_step_hook_path", *own)
        if self.role == "actor" and self.args.loss_type == "policy_loss" and is_last_stage(self.model):
            losses.add_step_sums(self.args, batches, data)
        biases = [bias.clone() for bias in self._expert_biases]
        with self._timers("forward_backward"):
            results = self._forward_backward(batches, data, global_batch_size)
        with self._timers("optimizer"):
            finite = self._all_finite(results)
            outcome = self._update(global_batch_size) if finite else None
        if outcome is None:
            for bias, before in zip(self._expert_biases, biases, strict=True):
                bias.copy_(before)
            self._report_skip(rollout_id, step_id, results, data)
        report = self._summarise(results, data, global_batch_size)
        report.skipped = outcome is None
        report.metrics.update(self._optimizer_metrics(outcome, global_batch_size))
        report.metrics.update(self.routing.end_step(len(batches)))
        return report

    def _zero_grads(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _forward_backward(self, batches: list[MicroBatch], data: dict, global_batch_size: int) -> list[dict]:
        from megatron.core import parallel_state as mpu
        from megatron.core.pipeline_parallel import get_forward_backward_func

        num_ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)

        def forward_step(iterator, chunk):
            batch = next(iterator)
            rows = None if self._reads_whole_stream else batch.rows
            with self.routing.training(batch, data):
                output = forward_logits(chunk, batch.tokens, batch.positions, batch.packed, rows)

            def loss_of(output):
                result = self._loss(batch, data, output)
                scaled = losses.scale_for_megatron(self.args, result.loss, len(batches), global_batch_size, num_ranks)
                tokens = losses.token_count(self.args, batch, data)
                kept = {"batch": batch, "result": result, "tokens": tokens}
                result.loss = result.loss.detach()
                self._progress.add("train", tokens=int(batch.tokens.numel()))
                counted = tokens if mpu.get_context_parallel_rank() == 0 else 0  # context ranks have the same tokens
                return scaled, torch.tensor(counted, dtype=torch.int, device=output.device), kept

            return output, loss_of

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.model],
            model=self.model,
            num_microbatches=len(batches),
            seq_length=self.args.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )

    def _loss(self, batch: MicroBatch, data: dict, output: torch.Tensor) -> losses.LossOutput:
        if not self.args.recompute_loss_function:
            result = self.loss_function(self.args, batch, data, output)
        else:
            result = torch.utils.checkpoint.checkpoint(
                self.loss_function, self.args, batch, data, output, use_reentrant=False
            )
        if not batch.response_lengths or sum(batch.response_lengths) == 0:
            result.loss = result.loss + 0 * output.sum()  # backward must still reach every collective of the model
        return result

    def _all_finite(self, results: list[dict]) -> bool:
        """Return whether loss and gradients are finite on every rank. fp16 leaves gradients to its loss scaler."""
        import torch.distributed as dist

        finite = all(bool(torch.isfinite(r["result"].loss)) for r in results)
        if finite and self.args.precision != "fp16":
            for chunk in self.model:
                for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                    finite = finite and bool(torch.isfinite(buffer.grad_data.sum(dtype=torch.float32)))
        if dist.get_world_size() == 1:
            return finite
        flag = torch.tensor([0.0 if finite else 1.0], device=device.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() == 0

    def _update(self, global_batch_size: int) -> float | None:
        """Step optimizer and schedule; returns the gradient norm, None when the loss scaler refused the step."""
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            return None
        self.scheduler.step(increment=global_batch_size)
        return float(grad_norm or 0.0)

    def _report_skip(self, rollout_id: int, step_id: int, results: list[dict], data: dict) -> None:
        found = [losses.suspicious_samples(r["batch"], data, r["result"].log_probs) for r in results]
        samples = sorted({s for part in found for s in part})
        logger.warning(
            "rollout %d step %d (%s): loss or gradient is not finite; the step is skipped, parameters are unchanged; "
            "samples of this rank with non-finite numbers: %s",
            rollout_id,
            step_id,
            self.role,
            samples or "none",
        )

    def _summarise(self, results: list[dict], data: dict, global_batch_size: int) -> StepReport:
        if not is_last_stage(self.model):
            return StepReport({}, False)
        sums: dict[str, float] = {}
        log_probs: dict[int, torch.Tensor] = {}
        for r in results:
            for name, value in r["result"].metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            if r["result"].log_probs is not None:
                batch = r["batch"]
                rows = r["result"].log_probs.split(batch.response_lengths)
                log_probs.update(zip(batch.indices, rows, strict=True))
        tokens = sum(r["tokens"] for r in results)
        weights = (0.0, 0.0)
        if self.args.skip_zero_advantage:
            batches = [r["batch"] for r in results]
            weights = (self._weight(batches, data, False), self._weight(batches, data, True))
        reduced = metrics_module.step_metrics(self.args, sums, tokens, global_batch_size, weights)
        return StepReport(reduced, False, log_probs)

    def _weight(self, batches: list[MicroBatch], data: dict, with_skipped: bool) -> float:
        """Return what the metrics' reducer gives for a column of ones: over the computed samples, or over all."""
        total = 0.0
        for batch in batches:
            chosen = batch.with_indices((*batch.indices, *batch.skipped) if with_skipped else batch.indices)
            masks = chosen.column(data, "loss_masks")
            ones = torch.ones(sum(map(len, masks)), device=masks[0].device) if masks else torch.zeros(0)
            total += float(losses.reducer_for(self.args, chosen, data)(ones))
        return total

    def _optimizer_metrics(self, grad_norm: float | None, global_batch_size: int) -> dict[str, float]:
        values = {"global_batch_size": float(global_batch_size), "step_skipped": float(grad_norm is None)}
        if grad_norm is not None:
            values["grad_norm"] = grad_norm
        for i, group in enumerate(self.optimizer.param_groups):
            values[f"lr-pg_{i}"] = float(group["lr"])
        return values
