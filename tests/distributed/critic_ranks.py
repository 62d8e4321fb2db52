"""What the ranks of `test_critic_layouts.py` do: two rounds of a critic on a layout, and one of the actor beside it."""

from __future__ import annotations

import os

from tests.distributed.train_ranks import end_layout, layout_ended_later, shards

PPO = dict(advantage_estimator="ppo", use_critic=True, gamma=0.9, lambd=0.8, kl_coef=0.1, value_clip=10.0)
LAYOUTS = {
    "data": {},
    "tensor": dict(tensor_model_parallel_size=2),
    "sequence": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "pipeline": dict(pipeline_model_parallel_size=2),
    "context": dict(context_parallel_size=2),
}


def new_rank(rank: int, world_size: int, port: int, folder: str, role: str, resume: str | None = None, **flags):
    from slime.backends.megatron_utils.actor import MegatronActor
    from tests.unit.megatron.megatron_helpers import train_args

    # A large epsilon keeps Adam from magnifying rounding where a gradient is nearly zero.
    common = dict(PPO, lr=1e-2, adam_eps=1e-3, global_batch_size=4, rollout_batch_size=4, load=f"{folder}/../model")
    args = train_args(common["load"], **{**common, **flags}, ref_load=f"{folder}/../ref", actor_num_gpus_per_node=2)
    actor = layout_ended_later(MegatronActor(args, rank, world_size, "127.0.0.1", port, role=role))
    actor.init(resume)
    return actor


def train(rank, world_size, port, folder, saved: str, resumes: bool = False, **flags) -> dict:
    """Round 0 and 1 of a critic, saved in between (or resumed there); then round 1 of the actor."""
    from megatron.core import parallel_state as mpu

    end_layout()
    where = (rank, world_size, port, folder)
    actor = new_rank(*where, "actor", **flags)
    critic = new_rank(*where, "critic", saved if resumes else None, **flags)
    shard = shards(mpu.get_data_parallel_world_size())[actor.dp_rank]
    scored = actor.score(0, shard)
    steps = {}
    if not resumes:
        steps |= critic.train(0, shard, [scored]).get("steps", {})
        if saved:
            os.makedirs(saved, exist_ok=True)
            critic.save(saved)
    report = critic.train(1, shard, [scored])
    steps |= report.get("steps", {})
    values = critic.score(2, shard).get("values", [])
    trained = actor.train(1, shard, [scored, critic.columns])
    return {
        "steps": steps,
        "rollout": {name: x for name, x in report.get("rollout", {}).items() if name.startswith("rollout/")},
        "actor": trained.get("steps", {}),
        "values": dict(zip(shard["sample_indices"], values, strict=True)) if values else {},
    }


def one_rank(rank, size, port, folder) -> dict:
    start(rank, size, port, folder)
    where = (rank, size, port, folder)
    return {"plain": train(*where, ""), "resumed": train(*where, f"{folder}/../iter_0000000", resumes=True)}


def two_ranks(rank, size, port, folder) -> dict:
    start(rank, size, port, folder)
    saved = f"{folder}/../iter_0000000"
    layouts = LAYOUTS.items()
    return {
        name: train(rank, size, port, folder, saved if name == "tensor" else "", **flags) for name, flags in layouts
    }


def start(rank, size, port, folder) -> None:
    from slime.backends.megatron_utils import initialize
    from tests.unit.megatron.megatron_helpers import train_args

    initialize.initialize(train_args(f"{folder}/../model"), rank, size, "127.0.0.1", port)
