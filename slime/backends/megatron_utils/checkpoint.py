"""Save and load one rank's part of a checkpoint directory (Megatron's torch_dist format), or load a Hugging Face folder.

Invariants: saved at any parallel layout, loaded at any other; after a load the next steps equal those of a run that never
stopped. The directory's commit marker (manifest) is the caller's; so is the choice of the directory.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from slime.backends.megatron_utils import lora, optimizer_fixes, shortcuts
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.lora import weights as lora_weights
from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.value_head import has_value_head, leave_out_foreign_head
from slime.utils import device

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"


def is_megatron_dir(path: str | Path) -> bool:
    """Return whether `path` holds torch_dist weights or names a folder of checkpoints."""
    path = Path(path)
    return (path / LATEST).is_file() or (path / "metadata.json").is_file()


def reference_dir(directory: str) -> Path:
    """Return where a checkpoint keeps the reference model's weights, when they are no longer those of --ref-load."""
    return Path(directory) / "reference"


def role_dir(directory: str, folder: str) -> Path:
    """Return where a checkpoint keeps the state of a train role (`TrainRole.folder`)."""
    return Path(directory) / folder


def role_source(path: str, step: int | None, folder: str) -> tuple[str, int | None]:
    """Return (path, step) of a train role's start weights: its own in a checkpoint of all roles, else what `path` holds."""
    if folder and is_megatron_dir(path):
        own = iteration_dir(path, step) / folder
        if is_megatron_dir(own):
            return str(own), None
    return path, step


def is_hf_dir(path: str | Path) -> bool:
    """Return whether `path` is a Hugging Face folder."""
    return (Path(path) / "config.json").is_file()


def iteration_dir(path: str | Path, step: int | None = None) -> Path:
    """Return the torch_dist directory under `path`: itself, iteration `step`, or the latest one.

    Raises: ValueError when it does not exist.
    """
    path = Path(path)
    if (path / "metadata.json").is_file():
        return path
    text = str(step) if step is not None else (path / LATEST).read_text().strip()
    found = path / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not (found / "metadata.json").is_file():
        raise ValueError(f"checkpoint {found} (step {text} of {path}) does not exist or is not complete")
    return found


def stored_dtype(directory: str | Path) -> str:
    """Return the number format of the weights in a torch_dist directory, e.g. bfloat16."""
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    dtype = entries["embedding.word_embeddings.weight"].properties.dtype
    return str(dtype).removeprefix("torch.")


def load_weights(args, model: list, path: str, step: int | None = None) -> None:
    """Load model weights only, without adapters, from a Megatron or a Hugging Face folder.

    Raises: ValueError when `path` is neither.
    """
    if is_megatron_dir(path):
        from megatron.core import dist_checkpointing

        directory = iteration_dir(path, step)
        if "lora" in dist_checkpointing.load_common_state_dict(str(directory)):
            raise ValueError(
                f"{directory} holds adapters only: --lora-adapter-path starts from its adapters/<name> folder"
            )
        state = {"model": _base_state(model)}
        if has_value_head(unwrap(model[-1])):
            last = state["model"] if len(model) == 1 else state["model"][f"chunk{len(model) - 1}"]
            leave_out_foreign_head(last, str(directory))
        loaded = dist_checkpointing.load(state, str(directory))
        _fill_model(model, loaded["model"])
    elif is_hf_dir(path):
        for chunk in model:
            load_hf_weights(chunk, path)
    else:
        raise ValueError(
            f"{path} is neither a Megatron checkpoint ({LATEST} or metadata.json) nor a Hugging Face folder (config.json)"
        )


def load_adapters(model: list, directory: str) -> None:
    """Load the adapters that `save_weights` wrote."""
    from megatron.core import dist_checkpointing

    _fill_model(model, dist_checkpointing.load({"model": _model_state(model)}, directory)["model"])


def save_weights(directory: str, model: list) -> None:
    """Write the weights in place, alone, into `directory`, which is made."""
    from megatron.core import dist_checkpointing

    from slime.backends.megatron_utils.checkpoint_writer import InProcessSave

    Path(directory).mkdir(exist_ok=True)
    dist_checkpointing.save({"model": _model_state(model)}, directory, sharded_strategy=InProcessSave())


def save(args, directory: str, model: list, optimizer, scheduler):
    """Write the trainer's state into `directory`, which exists and is shared by all ranks.

    Returns: None when it is written; with `--async-save` the BackgroundWrite that has to be finished.
    """
    from megatron.core import dist_checkpointing

    from slime.backends.megatron_utils.checkpoint_writer import BackgroundWrite, InProcessSave, failure_as_error

    state = _state(args, model, optimizer if not args.no_save_optim else None, scheduler, loading=False)
    with failure_as_error():
        request = dist_checkpointing.save(
            state,
            directory,
            sharded_strategy=InProcessSave(),
            async_sharded_save=args.async_save,
            content_metadata=_sharding_metadata(plain=True),
        )
    return None if request is None else BackgroundWrite(request)


def load(args, directory: str, model: list, optimizer, scheduler) -> None:
    """Restore everything that `save` wrote: weights, optimizer, schedule, random state.

    Raises: ValueError when the checkpoint is not one of this model, adapters included.
    """
    from megatron.core import dist_checkpointing

    directory = str(iteration_dir(directory))
    common = dist_checkpointing.load_common_state_dict(directory)
    if lora.adapters_of(model[0]) is not None:  # the checkpoint holds no base
        load_weights(args, model, args.lora_base)
        lora_weights.check_facts(common.get("lora"), args, model, directory)
    elif "lora" in common:
        raise ValueError(f"checkpoint {directory} holds adapters: --lora-rank {common['lora']['rank']} trains on")
    with_optimizer = optimizer is not None and not args.no_load_optim and bool(common.get("has_optimizer"))
    if with_optimizer:
        optimizer_fixes.prime(optimizer)
    state = _state(args, model, optimizer if with_optimizer else None, scheduler, loading=True)
    if common.get("rng_layout") != _rng_layout():
        state.pop("rng", None)  # saved by ranks that do not exist here; each rank keeps its seed
    loaded = dist_checkpointing.load(state, directory)
    _fill_model(model, loaded["model"])
    if with_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
        optimizer_fixes.unshare_steps(optimizer)
        shortcuts.fuse_adam(optimizer)
    elif optimizer is not None:
        optimizer.reload_model_params()
    if scheduler is not None and not args.no_load_optim and "scheduler" in common:
        _load_schedule(args, scheduler, common["scheduler"])
    if not args.no_load_rng and "rng" in loaded:
        _set_rng_state(loaded["rng"])


def _load_schedule(args, scheduler, saved: dict) -> None:
    """Put the schedule to the saved position; its shape stays (see `build_scheduler`) and differences are said."""
    now = scheduler.state_dict()
    changed = {name: (saved[name], now[name]) for name in now if name != "num_steps" and saved.get(name) != now[name]}
    scheduler.load_state_dict(saved)
    if changed and not args.use_checkpoint_opt_param_scheduler:
        shown = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in sorted(changed.items()))
        logger.warning("the learning-rate schedule differs from the checkpoint's, this command's counts: %s", shown)


def _sharding_metadata(plain: bool = False) -> dict:
    from megatron.core import parallel_state as mpu

    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    if not plain:
        metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    return metadata


def _model_state(model: list) -> dict:
    """What training changes: the adapters where there are some, else the whole model."""
    return _by_chunk(model, lambda chunk: _trained_state(unwrap(chunk)))


def _base_state(model: list) -> dict:
    metadata = _sharding_metadata()
    return _by_chunk(
        model, lambda chunk: lora_weights.without_adapters(unwrap(chunk).sharded_state_dict(metadata=metadata))
    )


def _trained_state(bare) -> dict:
    adapters = lora.adapters_of(bare)
    if adapters is not None:
        return lora_weights.sharded_state(adapters)
    return bare.sharded_state_dict(metadata=_sharding_metadata())


def _by_chunk(model: list, state_of: Callable) -> dict:
    if len(model) == 1:
        return state_of(model[0])
    return {f"chunk{i}": state_of(chunk) for i, chunk in enumerate(model)}


def _fill_model(model: list, state: dict) -> None:
    for i, chunk in enumerate(model):
        unwrap(chunk).load_state_dict(state if len(model) == 1 else state[f"chunk{i}"], strict=False)


def _state(args, model: list, optimizer, scheduler, *, loading: bool) -> dict:
    state = {"model": _model_state(model), "has_optimizer": optimizer is not None}
    if lora.adapters_of(model[0]) is not None and not loading:
        state["lora"] = lora_weights.facts(args, model)
    if optimizer is not None:
        if not loading:
            optimizer_fixes.prime(optimizer)
        metadata = _sharding_metadata()
        state["optimizer"] = optimizer.sharded_state_dict(
            {"model": state["model"]}, is_loading=loading, metadata=metadata
        )
    if scheduler is not None and not loading:
        state["scheduler"] = scheduler.state_dict()
    if not (args.no_load_rng if loading else args.no_save_rng):
        state["rng"] = _sharded_rng_state()
        state["rng_layout"] = _rng_layout()
    return state


def _rng_layout() -> tuple[int, int]:
    """Return (pipeline stages, tensor ranks): one random state is saved for each pair."""
    from megatron.core import parallel_state as mpu

    return mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()


def _sharded_rng_state():
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": device.rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    stage, tensor_rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng", state, _rng_layout(), (stage, tensor_rank), replica_id=replica)


def _set_rng_state(state: dict) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    device.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
