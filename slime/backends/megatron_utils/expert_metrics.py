"""Numbers of an optimizer step about its experts: how evenly they were visited, what was replayed, balancing losses.

All are means over the layers with experts. Ranks see different tokens (or other layers), so sums over all of them are exact.
Names (under `train/`): moe_max_load, tokens of the busiest expert over the mean (1 is even); moe_idle_experts, the share that
no token visited; moe_replayed, the share of choices that were replayed; moe_replay_differs, the share of those that the
trainer's router would have made otherwise; load_balancing_loss, seq_load_balancing_loss, global_load_balancing_loss and
z_loss before their coefficients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slime.utils import device

if TYPE_CHECKING:
    from slime.backends.megatron_utils.expert_routing import LayerRouting

# --moe-router-load-balancing-type -> Megatron's name of the loss
_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def collect(args, layers: list[LayerRouting], num_micro_batches: int, replays: bool) -> dict[str, float]:
    """Return the metrics of the step and forget its counts; all ranks of the model call it.

    A router that fuses its choice (`--moe-router-fusion`) tells nothing, so its load is absent.
    """
    losses = loss_names(args)
    table = torch.zeros(
        args.num_layers, args.num_experts + 2 + len(losses), dtype=torch.float64, device=device.device()
    )
    for layer in layers:
        table[layer.layer, : args.num_experts + 2] = layer.tally
        layer.tally.zero_()
    for column, name in enumerate(losses):
        table[:, args.num_experts + 2 + column] = _take_loss(name, args.num_layers) / num_micro_batches
    _sum_over_all_ranks(table)
    table = table[torch.tensor(_layers_with_experts(args), device=table.device)].cpu()
    counts, others = table[:, : args.num_experts], table[:, args.num_experts :]
    replayed, differing, *values = others.unbind(1)
    metrics = {name: float(value.mean()) for name, value in zip(losses, values, strict=True)}
    if counts.sum() > 0:
        metrics.update(_load(args, counts))
    if replays:
        choices = counts.sum() / args.moe_router_topk
        metrics["moe_replayed"] = float(replayed.sum() / choices) if choices else 0.0
        metrics["moe_replay_differs"] = float(differing.sum() / replayed.sum()) if replayed.sum() else 0.0
    return metrics


def _load(args, counts: torch.Tensor) -> dict[str, float]:
    busiest = counts.max(1).values / counts.mean(1)
    metrics = {"moe_max_load": float(busiest.mean()), "moe_idle_experts": float((counts == 0).double().mean())}
    if args.moe_per_layer_logging:
        metrics.update(
            {f"moe_max_load_layer_{i}": float(x) for i, x in zip(_layers_with_experts(args), busiest, strict=True)}
        )
    return metrics


def loss_names(args) -> dict[str, str]:
    """Return the balancing losses that are on: Megatron's name -> kind."""
    names = {}
    if args.moe_aux_loss_coeff and args.moe_router_load_balancing_type in _BALANCING:
        names[_BALANCING[args.moe_router_load_balancing_type]] = args.moe_router_load_balancing_type
    if args.moe_z_loss_coeff:
        names["z_loss"] = "z_loss"
    return names


def _take_loss(name: str, num_layers: int) -> torch.Tensor:
    """Return this rank's part of a loss, summed over micro-batches, [layers], such that the sum over all ranks is the loss."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    entry = get_moe_layer_wise_logging_tracker().get(name)
    if entry is None:  # no layer with experts on this rank
        return torch.zeros(num_layers, device=device.device())
    values = entry["values"].clone()
    entry["values"].zero_()
    stages = mpu.get_pipeline_model_parallel_world_size()
    copies = {"global_load_balancing_loss": 1, "z_loss": dist.get_world_size() // stages}
    return values / copies.get(name, mpu.get_data_parallel_world_size())


def _sum_over_all_ranks(table: torch.Tensor) -> None:
    import torch.distributed as dist

    if dist.get_world_size() > 1:
        dist.all_reduce(table)


def _layers_with_experts(args) -> list[int]:
    from slime.batching.flops import moe_layers

    return [i for i, has_experts in enumerate(moe_layers(args.moe_layer_freq, args.num_layers)) if has_experts]
