"""What the ranks of `test_expert_layouts.py` do: a round with replayed experts, saves and resumes, on a given layout."""

from __future__ import annotations

import os

import torch

from tests.distributed.train_ranks import end_layout, layout_ended_later

LENGTHS, RESPONSES = (9, 12, 7, 15, 30, 8, 11, 21), (4, 6, 3, 8, 20, 1, 5, 9)
LAYERS, EXPERTS, TOP_K = 4, 4, 2
SEQUENCE = dict(tensor_model_parallel_size=2, sequence_parallel=True)
LAYOUTS = {
    "expert_parallel": dict(expert_model_parallel_size=2),
    "tensor_and_expert_parallel": dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1, **SEQUENCE),
    "expert_tensor_parallel": dict(expert_tensor_parallel_size=2, **SEQUENCE),
    "expert_tensor_parallel_alone": dict(expert_tensor_parallel_size=2),
    "pipeline_parallel": dict(pipeline_model_parallel_size=2),
    "virtual_pipeline_parallel": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "context_parallel": dict(context_parallel_size=2),
    "context_and_expert_parallel": dict(context_parallel_size=2, expert_model_parallel_size=2),
}


def routed_experts(sample: int, rows: int) -> torch.Tensor:
    """Experts that no router would choose: random ones, [rows, layers, top k]."""
    generator = torch.Generator().manual_seed(sample)
    scores = torch.rand(rows, LAYERS, EXPERTS, generator=generator)
    return scores.topk(TOP_K).indices.to(torch.int16)


def shard_of(rank: int, data_ranks: int) -> dict:
    """This data rank's part of eight samples, two to a micro-batch, one step."""
    from tests.unit.megatron.megatron_helpers import make_shard, random_tokens

    mine = list(range(rank, 8, data_ranks))
    tokens = random_tokens(LENGTHS)
    shard = make_shard(
        None,
        [LENGTHS[i] for i in mine],
        [RESPONSES[i] for i in mine],
        micro_batches=[[i, i + 1] for i in range(0, len(mine), 2)],
        rollout_routed_experts=[routed_experts(i, LENGTHS[i] - 1) for i in mine],
        rollout_log_probs=[torch.full((RESPONSES[i],), -5.0) for i in mine],
    )
    shard["tokens"] = [tokens[i] for i in mine]
    shard["rewards"] = [1.0 - 0.3 * i for i in mine]
    shard["global_batch_sizes"] = [8]
    return shard


def new_actor(rank: int, world_size: int, port: int, folder: str, resume: str | None = None, **flags):
    """Return a started actor on a fresh layout, and its shard; the process group is kept between layouts."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.actor import MegatronActor
    from tests.unit.megatron.megatron_helpers import train_args

    end_layout()
    args = train_args(
        f"{folder}/../model", lr=1e-2, adam_eps=1e-3, global_batch_size=8, rollout_batch_size=8, n_samples_per_prompt=1,
        actor_num_gpus_per_node=world_size, use_routing_replay=True, use_rollout_routing_replay=True,
        use_kl_loss=True, kl_loss_coef=0.05, **flags,
    )  # fmt: skip
    actor = layout_ended_later(MegatronActor(args, rank, world_size, "127.0.0.1", port))
    actor.init(resume)
    return actor, shard_of(actor.dp_rank, mpu.get_data_parallel_world_size())


def weights_of(actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export_weights()}


def train(*where, rounds=(0,), **flags) -> dict:
    """Train and return what this rank reports of the last round, and the weights."""
    actor, shard = new_actor(*where, **flags)
    for rollout_id in rounds:
        report = actor.train(rollout_id, shard)
    return {"steps": report.get("steps", {}), "weights": weights_of(actor)}


def save_and_go_on(*where, directory: str, **layout) -> dict:
    """Train round 0, save, train round 1; returns the weights after both."""
    actor, shard = new_actor(*where, **layout)
    actor.train(0, shard)
    os.makedirs(directory, exist_ok=True)
    actor.save(directory)
    actor.train(1, shard)
    return {"weights": weights_of(actor)}


def one_rank(rank, size, port, folder) -> dict:
    """The reference, and a resume from what two expert ranks saved."""
    where, saved = _start(rank, size, port, folder), f"{folder}/../iter_0000000"
    return {"reference": train(*where), "resumed": train(*where, resume=saved, rounds=(1,))}


def two_ranks(rank, size, port, folder) -> dict:
    """Every layout of two ranks."""
    where, saved = _start(rank, size, port, folder), f"{folder}/../iter_0000000"
    results = {name: train(*where, **flags) for name, flags in LAYOUTS.items()}
    results["saved"] = save_and_go_on(*where, directory=saved, expert_model_parallel_size=2)
    results["resumed"] = train(*where, resume=saved, rounds=(1,), expert_model_parallel_size=2)
    return results


def _start(rank, size, port, folder) -> tuple:
    from slime.backends.megatron_utils import initialize
    from tests.unit.megatron.megatron_helpers import train_args

    initialize.initialize(train_args(f"{folder}/../model"), rank, size, "127.0.0.1", port)
    return rank, size, port, folder
