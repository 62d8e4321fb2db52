"""What the ranks of `test_lora_layouts.py` do: rounds of adapter training on a given layout, adapters and metrics out."""

from __future__ import annotations

import os

from tests.distributed.layout_cases import CP, TP, VPP
from tests.distributed.train_ranks import new_actor

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OWNERS = [0, 1, 1, 0, 0, 1, 0, 1]
SEQUENCE = dict(sequence_parallel=True, **TP)
PIPELINE = dict(pipeline_model_parallel_size=2)
WHOLE_LAYERS = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def train(rank, size, port, folder, names=("actor",), first=0, resume=None, save=None, **flags) -> dict:
    """Train the rounds up to 2 and return what this rank reports, the adapters, and the merged model of a single one."""
    lora = dict(
        lora_rank=4, lora_alpha=8.0, target_modules=ALL, lora_adapters=names, lora_adapter_path={},
        lora_base=f"{folder}/../model", use_kl_loss=True, kl_loss_coef=0.05,
    )  # fmt: skip
    actor, shard = new_actor(rank, size, port, folder, resume, model="model", **{**lora, **flags})
    if len(names) > 1:
        shard["adapters"] = [OWNERS[i] for i in shard["partition"]]
    results = []
    for rollout_id in range(first, 2):
        results.append(actor.train(rollout_id, shard))
        if save is not None and rollout_id == 0:
            os.makedirs(save, exist_ok=True)
            actor.save(save)
    steps = {step: metrics for r in results if r for step, metrics in r["steps"].items()}
    adapters = {f"{n}/{key}": t.clone() for n, part in actor.export_adapters().items() for key, t in part.items()}
    merged = {name: tensor.clone() for name, tensor in actor.export_weights()} if len(names) == 1 else {}
    return {"steps": steps, "adapters": adapters, "merged": merged}


def train_experts(rank, size, port, folder, **flags) -> dict:
    """The same on the mixture of experts in `folder`/model."""
    os.makedirs(f"{folder}/experts", exist_ok=True)
    return train(rank, size, port, f"{folder}/experts", **flags)


def one_rank(rank, size, port, folder) -> dict:
    _start(rank, size, port, folder)
    where = (rank, size, port, folder)
    return {
        "one": train(*where),
        "two": train(*where, names=("a", "b")),
        "resumed": train(*where, first=1, resume=f"{folder}/../iter_0000000"),
        "experts": train_experts(*where),
    }


def two_ranks(rank, size, port, folder) -> dict:
    """Every layout of two ranks."""
    _start(rank, size, port, folder)
    where = (rank, size, port, folder)
    two = dict(names=("a", "b"))
    return {
        "data": train(*where),
        "tensor": train(*where, save=f"{folder}/../iter_0000000", **TP),
        "sequence": train(*where, **SEQUENCE),
        "pipeline_recompute": train(*where, **PIPELINE, **WHOLE_LAYERS),
        "virtual_pipeline": train(*where, **VPP),
        "experts": train_experts(*where, expert_model_parallel_size=2),
        "two_data": train(*where, **two),
        "two_sequence": train(*where, **two, **SEQUENCE),
        "two_context": train(*where, **two, **CP),
        "two_pipeline_recompute": train(*where, **two, **PIPELINE, **WHOLE_LAYERS),
    }


def _start(rank, size, port, folder) -> None:
    from slime.backends.megatron_utils import initialize
    from tests.unit.megatron.megatron_helpers import train_args

    initialize.initialize(train_args(f"{folder}/../model"), rank, size, "127.0.0.1", port)
