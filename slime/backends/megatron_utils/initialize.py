"""Bring one training rank up: torch.distributed, Megatron's parallel groups, seeds, threads.

Invariants: the CPU shim is installed before anything of megatron.core is imported; every collective has the timeout
of `--distributed-timeout-minutes`; ranks of one model-parallel position draw equal weights. Does not know the model.
"""

from __future__ import annotations

import warnings
from datetime import timedelta

from slime.backends.megatron_utils import cpu_compat, layer_spec, megatron_globals
from slime.utils import device
from slime.utils.process_groups import init_gloo_group


def initialize(args, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
    """Join the process group of the train ranks and build Megatron's groups.

    Raises: RuntimeError when the ranks do not meet within the timeout.
    """
    import torch

    # megatron.core speaks about its own missing extras and coming signatures; a user can do nothing about either.
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch\.distributed)\b")
    torch.set_num_threads(args.omp_num_threads)
    if args.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    device.set_local_device(rank % args.actor_num_gpus_per_node)
    offer_names(args)
    _join(args, rank, world_size, master_addr, master_port)
    init_gloo_group()
    _build_groups(args)
    seed_everything(args)


def offer_names(args) -> None:
    """Make what users' modules import from Megatron work in this process; before they are imported. Twice is once."""
    cpu_compat.install()
    megatron_globals.offer(args)
    layer_spec.offer_local_layers()


def _join(args, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        assert dist.get_world_size() == world_size, (dist.get_world_size(), world_size)
        return
    where = f"tcp://{master_addr}:{master_port}"
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    try:
        dist.init_process_group(
            device.process_group_backend(), init_method=where, rank=rank, world_size=world_size, timeout=timeout
        )
    except Exception as error:
        raise RuntimeError(
            f"train rank {rank} of {world_size} did not meet the others at {where} within {timeout}: {error}"
        ) from error


def _build_groups(args) -> None:
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        return
    with cpu_compat.lone_groups_shared():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            create_gloo_process_groups=True,
        )


def seed_everything(args) -> None:
    """Seed Python, numpy, torch and Megatron's tensor-parallel generators from `--seed`."""
    import random

    import numpy as np
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    device.manual_seed_all(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave all process groups; a later `initialize` starts afresh."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
