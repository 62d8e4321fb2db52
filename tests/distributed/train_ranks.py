"""What the ranks of `test_train_layouts.py` do: one or more rounds on a given layout, weights and metrics out."""

from __future__ import annotations

import os

import torch

LENGTHS, RESPONSES = (9, 12, 7, 15, 30, 8, 11, 21), (4, 6, 3, 8, 20, 1, 5, 9)


def shards(data_ranks: int) -> list[dict]:
    """Split eight samples as the Data Buffer does, dynamic micro-batches of at most 40 tokens."""
    from types import SimpleNamespace

    from slime.batching.schedule import split_train_data_by_dp
    from tests.unit.megatron.megatron_helpers import random_tokens

    masks = [[1] * n for n in RESPONSES]
    masks[3] = [0] * RESPONSES[3]
    generator = torch.Generator().manual_seed(3)
    train_data = {
        "tokens": [t.tolist() for t in random_tokens(LENGTHS)],
        "response_lengths": list(RESPONSES),
        "rewards": [0.3, -1.2, 2.0, 0.7, -0.4, 1.1, -0.9, 0.2],
        "raw_reward": [1.0, 0.0] * 4,
        "truncated": [0] * 8,
        "sample_indices": list(range(8)),
        "rollout_ids": list(range(8)),
        "loss_masks": masks,
        "rollout_mask_sums": [sum(m) for m in masks],
        "rollout_log_probs": [(-4 * torch.rand(n, generator=generator)).tolist() for n in RESPONSES],
    }
    args = SimpleNamespace(
        global_batch_size=4, micro_batch_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=40,
        balance_data=False, balance_by_flops=False,
    )  # fmt: skip
    return split_train_data_by_dp(args, train_data, data_ranks)


def new_actor(rank: int, world_size: int, port: int, folder: str, resume: str | None = None, **flags):
    """Return a started actor on a fresh layout, with this rank's shard; the process group is kept between layouts."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.actor import MegatronActor
    from tests.unit.megatron.megatron_helpers import train_args

    mpu.destroy_model_parallel()
    # A large epsilon keeps Adam from magnifying rounding where a gradient is nearly zero.
    defaults = dict(
        lr=1e-2, adam_eps=1e-3, global_batch_size=4, rollout_batch_size=4, actor_num_gpus_per_node=world_size
    )
    args = train_args(f"{folder}/../model", **{**defaults, **flags})
    actor = MegatronActor(args, rank, world_size, "127.0.0.1", port)
    actor.init(resume)
    return actor, shards(mpu.get_data_parallel_world_size())[actor.dp_rank]


def weights_of(actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export_weights()}


def train(rank, world_size, port, folder, first=0, **flags) -> dict:
    """Train the rounds up to 2 and return what this rank reports, and the weights."""
    actor, shard = new_actor(rank, world_size, port, folder, **flags)
    results = [actor.train(i, shard) for i in range(first, 2)]
    steps = {step: metrics for r in results if r for step, metrics in r["steps"].items()}
    return {"steps": steps, "rollout": results[-1].get("rollout", {}), "weights": weights_of(actor)}


def nan_on_one_rank(rank, world_size, port, folder) -> dict:
    """A NaN on the last data rank only must stop the step on all."""
    actor, shard = new_actor(rank, world_size, port, folder)
    before = actor.export_checksums()
    if rank == world_size - 1:
        shard["rewards"] = [float("nan")] * len(shard["rewards"])
    actor.train(0, shard)
    return {"unchanged": actor.export_checksums() == before, "samples_seen": actor.scheduler.num_steps}


def save_and_go_on(rank, world_size, port, folder, directory, **layout) -> dict:
    """Train round 0, save, train round 1; returns the weights after both."""
    actor, shard = new_actor(rank, world_size, port, folder, **layout, **GRPO)
    actor.train(0, shard)
    os.makedirs(directory, exist_ok=True)
    actor.save(directory)
    actor.train(1, shard)
    return {"weights": weights_of(actor)}


GRPO = dict(use_tis=True, use_kl_loss=True, kl_loss_coef=0.05, entropy_coef=0.01)
WHITENED = dict(advantage_estimator="reinforce_plus_plus", normalize_advantages=True, calculate_per_token_loss=True)
TENSOR = dict(tensor_model_parallel_size=2)


def one_rank(rank, size, port, folder) -> dict:
    """The references, and a resume from what two ranks saved."""
    _start(rank, size, port, folder)
    saved = f"{folder}/../iter_0000000"
    where = (rank, size, port, folder)
    return {
        "grpo": train(*where, **GRPO),
        "whitened_per_token": train(*where, **WHITENED),
        "resumed": train(*where, first=1, resume=saved, **GRPO),
    }


def two_ranks(rank, size, port, folder) -> dict:
    """Every layout of two ranks."""
    _start(rank, size, port, folder)
    saved = f"{folder}/../iter_0000000"
    where = (rank, size, port, folder)
    return {
        "saved": save_and_go_on(*where, saved),
        "resumed": train(*where, first=1, resume=saved, **GRPO),
        "resumed_tensor_parallel": train(*where, first=1, resume=saved, **TENSOR, **GRPO),
        "grpo": train(*where, **GRPO),
        "whitened_per_token": train(*where, **WHITENED),
        "tensor_parallel": train(*where, **TENSOR, **GRPO),
        "sequence_parallel": train(*where, sequence_parallel=True, **TENSOR, **GRPO),
        "pipeline_parallel": train(*where, pipeline_model_parallel_size=2, **GRPO),
        "nan": nan_on_one_rank(*where),
    }


def _start(rank, size, port, folder) -> None:
    from slime.backends.megatron_utils import initialize
    from tests.unit.megatron.megatron_helpers import train_args

    initialize.initialize(train_args(f"{folder}/../model"), rank, size, "127.0.0.1", port)
