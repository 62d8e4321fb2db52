"""Write the model as a Hugging Face folder.

Invariants: the folder appears under its name only when it is complete (written beside it, then renamed); the source
checkpoint is never overwritten; one rank writes, all ranks take part in the export.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from slime.utils.weight_file import write_safetensors

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.pt", "*.pth", "*.gguf")
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def save_hf(export: Iterable[tuple[str, torch.Tensor]], args, out_dir: str, max_shard_bytes: int = 4 * 2**30) -> None:
    """Write exported tensors to `out_dir` with the config and tokenizer files of `--hf-checkpoint`.

    Raises: ValueError when `out_dir` is the source checkpoint or lies around it.
    """
    import torch.distributed as dist

    target, source = Path(out_dir).resolve(), Path(args.hf_checkpoint).resolve()
    if target == source or target in source.parents:
        raise ValueError(f"--save-hf {out_dir} would overwrite --hf-checkpoint {args.hf_checkpoint}")
    writes = dist.get_rank() == 0
    building = target.with_name(f".{target.name}.incomplete")
    if writes:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        _copy_side_files(source, building)
    writer = _ShardWriter(building, max_shard_bytes) if writes else None
    for name, tensor in export:
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        _set_dtype(building / "config.json", writer.close())
        _replace(building, target)
    dist.barrier()


def _copy_side_files(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_PATTERNS):
            shutil.copy2(path, target / path.name)


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = _DTYPE_NAMES[dtype]
    path.write_text(json.dumps(config, indent=2) + "\n")


def _replace(building: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(building, target)
    shutil.rmtree(old, ignore_errors=True)


class _ShardWriter:
    """Collect tensors and write a file whenever `max_shard_bytes` is reached; final names need the count."""

    def __init__(self, folder: Path, max_shard_bytes: int):
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.pending: dict[str, torch.Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.shards: list[list[str]] = []
        self.dtype = torch.float32

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.max_shard_bytes:
            self._flush()
        assert name not in self.pending and all(name not in shard for shard in self.shards), f"{name} exported twice"
        self.pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.pending_bytes += size
        self.total_bytes += size
        if name.endswith("norm.weight"):  # never quantised
            self.dtype = tensor.dtype

    def _flush(self) -> None:
        write_safetensors(self.pending, self.folder / f"part-{len(self.shards)}")
        self.shards.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> torch.dtype:
        """Write what is left, give the files their names, write the index of several; return the weights' dtype."""
        self._flush()
        count = len(self.shards)
        weight_map = {}
        for i, names in enumerate(self.shards):
            file = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self.folder / f"part-{i}", self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        return self.dtype
