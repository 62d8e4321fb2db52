"""Dump what the trainer trained on in one round, one file, so that it joins the rollout dump sample by sample.

Invariants: samples of all data ranks, sorted by `rollout_position`; per-token columns cover the full response; plain
containers and CPU tensors only, so that it loads with `weights_only=True`; the file appears when it is complete.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from slime.backends.megatron_utils.data import WHOLE_BATCH_KEYS, real_samples

FORMAT_VERSION = 2


def save_train_dump(args, rollout_id: int, rank: int, data: dict) -> Path | None:
    """Gather the shards of the data ranks and write them to `--save-debug-train-data`.

    Called by the ranks of the last pipeline stage; the first data, tensor and context rank writes and gets the path.
    """
    from megatron.core import parallel_state as mpu

    if mpu.get_tensor_model_parallel_rank() != 0 or mpu.get_context_parallel_rank() != 0:
        return None
    shards = _gather(_plain_shard(data, mpu.get_data_parallel_rank()))
    if shards is None:
        return None
    samples = [sample for shard in shards for sample in shard.pop("samples")]
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": rank,
        "samples": sorted(samples, key=lambda sample: sample["rollout_position"]),
        "dp_shards": shards,
        "raw_reward": list(data.get("raw_reward") or []),
    }
    path = Path(args.save_debug_train_data.format(rollout_id=rollout_id, rank=rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.save(content, partial)
    os.replace(partial, path)
    return path


def _plain_shard(data: dict, data_rank: int) -> dict:
    count = len(data["tokens"])
    columns = {
        key: value
        for key, value in data.items()
        if key not in WHOLE_BATCH_KEYS and isinstance(value, (list, torch.Tensor)) and len(value) == count
    }
    samples = []
    for i in real_samples(data):
        sample = {key: _on_host(value[i]) for key, value in columns.items()}
        ids = data.get("sample_indices")
        position = data["partition"][i]
        sample.update(
            rollout_position=position,
            sample_index=ids[i] if ids is not None else position,
            data_parallel_rank=data_rank,
        )
        samples.append(sample)
    schedule = {
        key: data[key] for key in ("partition", "global_batch_sizes", "num_microbatches", "micro_batch_indices")
    }
    return {"data_parallel_rank": data_rank, "samples": samples, **schedule}


def _on_host(value):
    return value.detach().cpu().clone() if torch.is_tensor(value) else value


def _gather(shard: dict) -> list[dict] | None:
    """Return the shards of all data ranks on the first, None elsewhere."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    if mpu.get_data_parallel_world_size() == 1:
        return [shard]
    group = mpu.get_data_parallel_group_gloo()
    first = mpu.get_data_parallel_rank() == 0
    shards = [None] * group.size() if first else None
    dist.gather_object(shard, shards, dst=dist.get_global_rank(group, 0), group=group)
    return shards
