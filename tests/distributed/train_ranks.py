"""What the ranks of `test_train_layouts.py` do: rounds on a given layout; weights, metrics and a dump of the data out."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import torch

from slime.algorithms.off_policy_hooks import mis_function
from tests.distributed.layout_cases import CASES, CP, PP, REFERENCES, TP, VPP, Case

CAP = 40
LENGTHS = (9, 12, 7, 15, 50, 8, 11, 21)  # the fifth is above the cap
RESPONSES = (4, 6, 3, 8, 33, 1, 5, 9)
FULLY_MASKED = 3

SCENARIOS = {
    "grpo": dict(use_tis=True, use_kl_loss=True, kl_loss_coef=0.05, entropy_coef=0.01),
    "per_token": dict(
        advantage_estimator="reinforce_plus_plus", normalize_advantages=True, calculate_per_token_loss=True
    ),
    "gspo": dict(advantage_estimator="gspo", use_opsm=True),
    "kept_and_mis": dict(
        rollout_top_p=0.9, use_tis=True, custom_tis_function_path="tests.distributed.train_ranks.normalised_mis"
    ),
    "custom": dict(
        loss_type="custom_loss",
        custom_loss_function_path="tests.distributed.train_ranks.whole_stream_loss",
    ),
    "few": dict(use_tis=True, use_kl_loss=True, kl_loss_coef=0.05, global_batch_size=2),
    "few_per_token": dict(calculate_per_token_loss=True, global_batch_size=2),
}
BATCHES = {
    "dynamic": dict(use_dynamic_batch_size=True, max_tokens_per_gpu=CAP),
    "single": dict(micro_batch_size=1),
    "pairs": dict(micro_batch_size=2),
    "whole": dict(micro_batch_size=4),
}


def normalised_mis(args, **call):
    return mis_function(with_normalisation(args), **call)


def with_normalisation(args) -> SimpleNamespace:
    return SimpleNamespace(**vars(args), tis_level="sequence", tis_upper_bound=1e3, tis_batch_normalize=True)


normalised_mis.step_sums = lambda args: mis_function.step_sums(with_normalisation(args))


def whole_stream_loss(args, batch, logits, reducer):
    """A loss of all tokens and of columns: policy gradient of the responses, likelihood of the prompts, the policy loss."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, policy_loss_function

    flat = batch["packed_tokens"][0]
    table = logits[0].log_softmax(-1)
    likelihoods = table[:-1].gather(1, flat[1:, None])[:, 0]
    losses, told, start = [], logits.new_zeros(()), 0
    for total, response, advantages in zip(
        batch["total_lengths"], batch["response_lengths"], batch["advantages"], strict=True
    ):
        own = likelihoods[start : start + total - 1]
        losses.append(-own[total - 1 - response :] * advantages)
        told = told - own[: total - 1 - response].mean()
        start += total
    assert int(batch["packed_seq_params"].cu_seqlens_q[len(batch["tokens"])]) == start
    policy, _ = policy_loss_function(args, batch, logits, reducer)
    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    assert torch.allclose(torch.cat(found["log_probs"]), -torch.cat(losses) / torch.cat(batch["advantages"]), atol=1e-4)
    return reducer(torch.cat(losses)) + told + policy, {"told": told, "policy": policy}


def kept_tokens() -> dict:
    """A record of random ids for every third response token or so, others unrestricted."""
    generator = torch.Generator().manual_seed(5)
    counts = [torch.randint(0, 3, (n,), generator=generator) * 40 for n in RESPONSES]
    return {
        "rollout_top_p_token_ids": [
            torch.randint(0, 260, (int(c.sum()),), generator=generator).tolist() for c in counts
        ],
        "rollout_top_p_token_offsets": [[0, *c.cumsum(0).tolist()] for c in counts],
    }


def shards(data_ranks: int, args=None) -> list[dict]:
    """Split eight samples as the Data Buffer does; without arguments into steps of four, dynamic micro-batches."""
    from slime.batching.schedule import split_train_data_by_dp
    from tests.unit.megatron.megatron_helpers import random_tokens

    masks = [[1] * n for n in RESPONSES]
    masks[FULLY_MASKED] = [0] * RESPONSES[FULLY_MASKED]
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
    if args is not None and args.rollout_top_p != 1.0:
        train_data |= kept_tokens()
    if args is None:
        args = SimpleNamespace(
            global_batch_size=4, micro_batch_size=1, balance_data=False, balance_by_flops=False,
            context_parallel_size=1, virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_size=1,
            **BATCHES["dynamic"],
        )  # fmt: skip
    return split_train_data_by_dp(
        args,
        train_data,
        data_ranks,
        cp_size=args.context_parallel_size,
        vpp_size=args.virtual_pipeline_model_parallel_size or 1,
        microbatch_group_size_per_vp_stage=args.pipeline_model_parallel_size,
    )


_ACTORS: list = []


def layout_ended_later(actor):
    """Return the actor, which `end_layout` will end."""
    _ACTORS.append(actor)
    return actor


def end_layout() -> None:
    """End the actors so far and every process group but that of all ranks: each gloo group has threads, which would pile up."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    dist.barrier()  # nobody leaves a group that others still use
    for actor in _ACTORS:
        for chunk in actor.model:
            chunk.__dict__.clear()  # gradient hooks hold it, and it the groups, where no garbage collector sees
        actor.__dict__.clear()
    _ACTORS.clear()
    mpu.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def new_actor(rank: int, world_size: int, port: int, folder: str, resume: str | None = None, model="tied", **flags):
    """Return a started actor on a fresh layout, with this rank's shard; the process group is kept between layouts."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.actor import MegatronActor
    from tests.unit.megatron.megatron_helpers import train_args

    end_layout()
    # A large epsilon keeps Adam from magnifying rounding where a gradient is nearly zero.
    defaults = dict(
        lr=1e-2, adam_eps=1e-3, global_batch_size=4, rollout_batch_size=4, actor_num_gpus_per_node=world_size
    )
    args = train_args(f"{folder}/../{model}", **{**defaults, **BATCHES["dynamic"], **flags})
    args.balance_data = args.balance_by_flops = False
    actor = layout_ended_later(MegatronActor(args, rank, world_size, "127.0.0.1", port))
    actor.init(resume)
    return actor, shards(mpu.get_data_parallel_world_size(), args)[actor.dp_rank]


def weights_of(actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export_weights()}


def train(rank, world_size, port, folder, first=0, **flags) -> dict:
    """Train one round of two optimizer steps and return what this rank reports, and the weights."""
    actor, shard = new_actor(rank, world_size, port, folder, **flags)
    results = [actor.train(first, shard)]
    steps = {step: metrics for r in results if r for step, metrics in r["steps"].items()}
    return {"steps": steps, "rollout": results[-1].get("rollout", {}), "weights": weights_of(actor)}


def run_case(case: Case, rank, world_size, port, folder) -> dict:
    batching = dict.fromkeys(("max_tokens_per_gpu",)) | {"use_dynamic_batch_size": False} | BATCHES[case.batches]
    flags = {**SCENARIOS[case.scenario], **batching, **case.flags}
    dump = f"{folder}/dumps/{case.name}-{{rollout_id}}.pt"
    return train(rank, world_size, port, folder, model=case.model, save_debug_train_data=dump, **flags)


def nan_on_one_rank(rank, world_size, port, folder) -> dict:
    """A NaN on the last data rank only must stop the step on all."""
    actor, shard = new_actor(rank, world_size, port, folder)
    before = actor.export_checksums()
    if rank == world_size - 1:
        shard["rewards"] = [float("nan")] * len(shard["rewards"])
    actor.train(0, shard)
    return {"unchanged": actor.export_checksums() == before, "samples_seen": actor.scheduler.num_steps}


def save_and_go_on(rank, world_size, port, folder, directory, **flags) -> dict:
    """Train round 0, save, train round 1; returns the weights after both."""
    actor, shard = new_actor(rank, world_size, port, folder, **SCENARIOS["grpo"], **flags)
    actor.train(0, shard)
    os.makedirs(directory, exist_ok=True)
    actor.save(directory)
    actor.train(1, shard)
    return {"weights": weights_of(actor)}


def run_all(rank, size, port, folder) -> dict:
    """Every case of this number of ranks, then what belongs to checkpoints."""
    _start(rank, size, port, folder)
    where = (rank, size, port, folder)
    results = {case.name: run_case(case, *where) for case in [*REFERENCES, *CASES] if case.ranks == size}
    results |= EXTRAS[size](where)
    end_layout()
    threads = len(os.listdir("/proc/self/task"))
    assert threads < 64, f"{threads} threads are left: process groups of earlier layouts still live"
    return results


def _saved(folder, name: str) -> str:
    return f"{folder}/../saved-{name}/iter_0000000"


#: Padded vocabularies of 288 rows without and of 384 rows with two tensor ranks.
PADDED = {"make_vocab_size_divisible_by": 96}


def _resume(where, name: str, **flags) -> dict:
    return train(*where, first=1, resume=_saved(where[3], name), **SCENARIOS["grpo"], **PADDED, **flags)


def _two_ranks(where) -> dict:
    folder = where[3]
    return {
        "saved dp": save_and_go_on(*where, _saved(folder, "dp"), **PADDED),
        "saved tp": save_and_go_on(*where, _saved(folder, "tp"), **TP, **PADDED),
        "saved vpp": save_and_go_on(*where, _saved(folder, "vpp"), **VPP, **BATCHES["single"], **PADDED),
        "dp -> dp": _resume(where, "dp"),
        "dp -> tp": _resume(where, "dp", **TP),
        "tp -> pp": _resume(where, "tp", **PP),
        "tp -> cp": _resume(where, "tp", **CP),
        "vpp -> tp": _resume(where, "vpp", **TP),
        "nan": nan_on_one_rank(*where),
    }


def _one_rank(where) -> dict:
    """Runs after the two ranks, which saved."""
    return {
        "dp -> one": _resume(where, "dp"),
        "tp -> one": _resume(where, "tp"),
        "vpp -> one": _resume(where, "vpp"),
    }


EXTRAS = {1: _one_rank, 2: _two_ranks, 4: lambda where: {}}


def _start(rank, size, port, folder) -> None:
    from slime.backends.megatron_utils import initialize
    from tests.unit.megatron.megatron_helpers import train_args

    initialize.initialize(train_args(f"{folder}/../tied"), rank, size, "127.0.0.1", port)
