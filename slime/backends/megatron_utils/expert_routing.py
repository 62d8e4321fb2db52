"""Which experts tokens visit in training: replayed from an earlier pass or from the engine, and counted.

Each router asks a `LayerRouting` through the hook that Megatron has for this. Replayed experts replace the choice only: their
weights are still the trainer's own scores, so routers get gradients as always. Sources of a replay:
- `--use-routing-replay`: the pass for the old log-probs records, training replays, micro-batch by micro-batch;
- `--use-rollout-routing-replay`: what the engine reported, in both passes.

Invariants: a token without a record (the last of a sample, text that no engine has read) chooses for itself; padding is spread
over the experts. A layer that is computed again in backward gets what it had in forward: outside a forward pass each layer
takes its replays in the order in which it got them. Routers of the reference are left alone.
Shapes: T tokens of this rank's stream, L layers, K experts a token, N experts.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from slime.backends.megatron_utils import expert_metrics
from slime.backends.megatron_utils.data import MicroBatch
from slime.backends.megatron_utils.model_provider import unwrap
from slime.batching.context_parallel import slice_sequence
from slime.utils import device

COLUMN = "rollout_routed_experts"
NOT_RECORDED = -1


@dataclass
class _Pass:
    """One micro-batch on its way through the model. `experts`: layer -> [T, K] to replay, or None; `real`: [T] no padding."""

    trains: bool
    experts: dict[int, torch.Tensor] | _EngineExperts | None = None
    records: dict[int, torch.Tensor] | None = None
    real: torch.Tensor | None = None


@dataclass
class LayerRouting:
    """What one router is asked to choose, and what it chose in training since `expert_metrics` last looked.

    Stands in `router.router_replay`. tally: [N + 2] tokens per expert, then how many choices were replayed, and how many of
    those the router itself would have made otherwise.
    """

    owner: ExpertRouting
    layer: int
    tally: torch.Tensor
    waiting: deque[torch.Tensor] = field(default_factory=deque)

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Return (scores [T, K], experts [T, K]); called by Megatron's router with scores [T, N]."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        now = self.owner.current
        if now is None:  # backward computes this layer again
            wanted = self.waiting.popleft() if self.waiting else None
        else:
            wanted = None if now.experts is None else now.experts.get(self.layer)
            if wanted is not None:
                wanted = wanted.to(own.device, own.dtype)
                if now.trains:
                    self.waiting.append(wanted)
        if wanted is not None:
            chosen = torch.where(wanted < 0, own, wanted)
            values = scores.gather(1, chosen)
        else:
            chosen = own
        if now is not None:
            self._note(now, own, wanted, chosen)
        return values, chosen

    @torch.no_grad()
    def _note(self, now: _Pass, own: torch.Tensor, wanted: torch.Tensor | None, chosen: torch.Tensor) -> None:
        if now.records is not None:
            now.records[self.layer] = chosen.to(torch.int16)
        if not now.trains:
            return
        real = chosen if now.real is None else chosen[now.real]
        self.tally[:-2] += torch.bincount(real.flatten(), minlength=len(self.tally) - 2)
        if wanted is not None:
            recorded = wanted[:, 0] >= 0 if now.real is None else (wanted[:, 0] >= 0) & now.real
            differs = (own.sort(1).values != chosen.sort(1).values).any(1) & recorded
            self.tally[-2] += recorded.sum()
            self.tally[-1] += differs.sum()


class ExpertRouting:
    """The routers of one model (list of wrapped chunks); without routers everything here does nothing."""

    def __init__(self, args, model: list, role: str = "actor"):
        self._args = args
        self._from_engine = args.use_rollout_routing_replay and role == "actor"
        self._from_pass = args.use_routing_replay and not self._from_engine and role == "actor"
        self._recorded: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        self.current: _Pass | None = None
        self.layers = [self._attach(router) for router in _routers(model)]

    def _attach(self, router) -> LayerRouting:
        tally = torch.zeros(router.num_experts + 2, dtype=torch.int64, device=device.device())
        router.router_replay = LayerRouting(self, router.layer_number - 1, tally)
        return router.router_replay

    @property
    def keeps_micro_batches(self) -> bool:
        """Whether the pass for old log-probs must run the micro-batches of training."""
        return self._from_pass

    def forget(self) -> None:
        """Drop what earlier rounds recorded."""
        self._recorded.clear()

    @contextmanager
    def old_policy(self, batch: MicroBatch, data: dict) -> Iterator[None]:
        """Around the forward of a micro-batch that computes the actor's old log-probs."""
        records = self._recorded.setdefault(batch.indices, {}) if self._from_pass else None
        with self._during(_Pass(False, self._engine_experts(batch, data), records)):
            yield

    @contextmanager
    def training(self, batch: MicroBatch, data: dict) -> Iterator[None]:
        """Around the forward of a micro-batch in training."""
        experts = self._recorded[batch.indices] if self._from_pass else self._engine_experts(batch, data)
        with self._during(_Pass(True, experts, real=self._real_tokens(batch))):
            yield

    def end_step(self, num_micro_batches: int) -> dict[str, float]:
        """Return the step's metrics, on every rank; all ranks call it after the backward of an optimizer step."""
        for layer in self.layers:
            # Full recomputation takes every replay once, none at all takes none.
            assert not layer.waiting or len(layer.waiting) == num_micro_batches, (layer.layer, len(layer.waiting))
            layer.waiting.clear()
        if not self._args.num_experts:
            return {}
        replays = self._from_engine or self._from_pass
        return expert_metrics.collect(self._args, self.layers, num_micro_batches, replays)

    @contextmanager
    def _during(self, one: _Pass) -> Iterator[None]:
        self.current = one if self.layers else None
        try:
            yield
        finally:
            self.current = None

    def _engine_experts(self, batch: MicroBatch, data: dict) -> _EngineExperts | None:
        if not (self._from_engine and self.layers):
            return None
        if COLUMN not in data:
            raise ValueError(f"--use-rollout-routing-replay: the rollout data has no {COLUMN}")
        return _EngineExperts(batch.column(data, COLUMN), batch.total_lengths, self._tokens_here(batch), self._args)

    def _real_tokens(self, batch: MicroBatch) -> torch.Tensor | None:
        here = self._tokens_here(batch) if self.layers else None
        if here is None or int(here.min()) >= 0:
            return None
        return (here >= 0).to(device.device())

    def _tokens_here(self, batch: MicroBatch) -> torch.Tensor:
        """Return for each token that this rank's routers see its place in the samples laid end to end, -1 for padding, [T]."""
        from megatron.core import parallel_state as mpu

        size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        places = torch.arange(sum(batch.total_lengths)).split(batch.total_lengths)
        here = torch.cat([slice_sequence(place, size, rank, pad=NOT_RECORDED) for place in places])
        here = torch.nn.functional.pad(here, (0, batch.tokens.size(1) - len(here)), value=NOT_RECORDED)
        if self._args.sequence_parallel:
            here = here.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
        return here


class _EngineExperts:
    """The engine's record of a micro-batch, cut for one layer when that layer asks.

    rows: per sample [at most tokens - 1, L, K]. here: [T], see `ExpertRouting._tokens_here`.
    """

    def __init__(self, rows: list[torch.Tensor], lengths: tuple[int, ...], here: torch.Tensor, args):
        self._rows, self._lengths, self._here, self._num_experts = rows, lengths, here, args.num_experts

    def get(self, layer: int) -> torch.Tensor:
        """Return [T, K]; a token without a record has -1."""
        return torch.where(self._padding[:, None], self._spread, self._of_samples[:, layer].long()[self._here])

    @functools.cached_property
    def _of_samples(self) -> torch.Tensor:
        """[sum of lengths + 1, L, K], the last row for what is in no sample."""
        whole = self._rows[0].new_full((sum(self._lengths) + 1, *self._rows[0].shape[1:]), NOT_RECORDED)
        start = 0
        for rows, length in zip(self._rows, self._lengths, strict=True):
            whole[start : start + len(rows)] = rows
            start += length
        if whole.shape[2] > 1:
            whole[(whole == 0).all(2)] = NOT_RECORDED  # nobody visits expert 0 twice: the engine wrote nothing there
        return whole

    @functools.cached_property
    def _padding(self) -> torch.Tensor:
        return self._here < 0

    @functools.cached_property
    def _spread(self) -> torch.Tensor:
        """[T, K] with every expert about equally often."""
        count = self._rows[0].shape[2]
        return torch.arange(len(self._here) * count).view(-1, count) % self._num_experts


def _routers(model: list) -> list:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for chunk in model for module in unwrap(chunk).modules() if isinstance(module, TopKRouter)]
