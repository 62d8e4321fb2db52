"""Weights of the served model, addressable by Hugging Face name.

q/k/v, gate/up and a layer's experts are stored fused because one matrix product is cheaper than three; every Hugging Face tensor is a row
range of one stored tensor, so an update copies in place and readers never see names change.
On a processor without arithmetic in the model's dtype, `computed` holds copies in a dtype that it has; names, updates and
checksums always mean the stored tensors.
Invariants: shapes on the outside are those of the Hugging Face model; an update either applies to all its tensors or to
none. Does not know process groups or HTTP; only the scheduler thread calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slime.engine.model_config import ModelConfig
from slime.engine.weight_stash import WeightStash
from slime.utils.checksum import tensor_checksum
from slime.utils.quantization import Assembler
from slime.utils.weight_file import open_safetensors

TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Location:
    """Rows start..end of the stored tensor `stored`; `shape` is the Hugging Face shape."""

    stored: str
    start: int
    end: int
    shape: tuple[int, ...]


def weight_layout(config: ModelConfig) -> dict[str, Location]:
    """Return where each Hugging Face tensor of the model lives."""
    hidden, ffn = config.hidden_size, config.ffn_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layout: dict[str, Location] = {}

    def put(stored: str, *parts: tuple[str, tuple[int, ...]]) -> None:
        start = 0
        for name, shape in parts:
            layout[name] = Location(stored, start, start + shape[0], shape)
            start += shape[0]

    put("embed", ("model.embed_tokens.weight", (config.vocab_size, hidden)))
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [(f"{attention}{x}_proj", q_rows if x == "q" else kv_rows) for x in "qkv"]
        put(f"{i}.norm1", (prefix + "input_layernorm.weight", (hidden,)))
        put(f"{i}.qkv", *((name + ".weight", (rows, hidden)) for name, rows in qkv))
        if config.qkv_bias:
            put(f"{i}.qkv_bias", *((name + ".bias", (rows,)) for name, rows in qkv))
        if config.qk_norm:
            put(f"{i}.qk_norm", *((f"{attention}{x}_norm.weight", (config.head_dim,)) for x in "qk"))
        put(f"{i}.o", (attention + "o_proj.weight", (hidden, q_rows)))
        if config.o_bias:
            put(f"{i}.o_bias", (attention + "o_proj.bias", (hidden,)))
        put(f"{i}.norm2", (prefix + "post_attention_layernorm.weight", (hidden,)))
        if config.has_experts(i):
            _put_experts(put, config, f"{i}.", mlp)
        else:
            put(f"{i}.gate_up", *((f"{mlp}{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up")))
            put(f"{i}.down", (mlp + "down_proj.weight", (hidden, ffn)))
    put("norm", ("model.norm.weight", (hidden,)))
    if not config.tied_embeddings:
        put("head", (TIED_HEAD, (config.vocab_size, hidden)))
    return layout


def _put_experts(put: Callable, config: ModelConfig, layer: str, mlp: str) -> None:
    """Lay a layer's experts below each other in one tensor for gate and up and one for down."""
    sizes, hidden = config.experts, config.hidden_size
    names = [f"{mlp}experts.{i}." for i in range(sizes.count)]
    put(layer + "router", (mlp + "gate.weight", (sizes.count, hidden)))
    up = [(f"{name}{x}_proj.weight", (sizes.width, hidden)) for name in names for x in ("gate", "up")]
    put(layer + "gate_up", *up)
    put(layer + "down", *((name + "down_proj.weight", (hidden, sizes.width)) for name in names))


class Weights:
    """Stored tensors plus the map from Hugging Face names to their rows."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, compute_dtype: torch.dtype | None = None
    ):
        self.config = config
        self.dtype, self.compute_dtype = dtype, compute_dtype or dtype
        self._computed: dict[str, torch.Tensor] | None = None
        self.layout = weight_layout(config)
        self.stored: dict[str, torch.Tensor] = {}
        shapes = {at.stored: (at.end, *at.shape[1:]) for at in self.layout.values()}  # the last part has the last row
        for key, shape in shapes.items():
            self.stored[key] = torch.empty(shape, dtype=dtype, device=device)
        self.device = device
        self._snapshot: dict[str, torch.Tensor] | None = None
        self._stash: WeightStash | None = None
        self._assembler = Assembler(config.quantization, self.layout)
        self._part_checksums: dict[str, str] = {}  # of quantised weights, as they came
        self.num_changes = 0
        """Counts every change of any weight; what was computed under another count is stale."""

    @property
    def computed(self) -> dict[str, torch.Tensor]:
        """The stored tensors in the dtype of arithmetic: themselves, or copies made anew after every change."""
        if self.compute_dtype == self.dtype:
            return self.stored
        if self._computed is None:
            self._computed = {key: tensor.to(self.compute_dtype) for key, tensor in self.stored.items()}
        return self._computed

    @property
    def names(self) -> list[str]:
        return list(self.layout)

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.stored.values())

    def view(self, name: str) -> torch.Tensor:
        """Return the live tensor of Hugging Face name `name` (writes change the model).

        Raises: ValueError while the weights are released.
        """
        self._require_resident()
        location = self.layout[self._canonical(name)]
        return self.stored[location.stored][location.start : location.end]

    def problem_with(self, name: str, shape: tuple[int, ...] | list[int]) -> str | None:
        """Return why a tensor of this name and shape cannot be taken, None when it can."""
        location = self.layout.get(self._canonical(name))
        if location is None:
            return f"unknown weight {name!r} for {self.config.architecture}"
        if tuple(shape) != location.shape:
            return f"weight {name!r} has shape {list(shape)}, expected {list(location.shape)}"
        return None

    def assign(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy all tensors in place, or none. A quantised weight changes when the last of its parts has come.

        Raises: ValueError naming the first tensor that does not fit.
        """
        parts = {name: tensor.clone() for name, tensor in tensors.items() if self._assembler.is_part(name)}
        ready = self._assembler.take({**tensors, **parts})
        for name, tensor in ready.items():
            problem = self.problem_with(name, tensor.shape)
            if problem:
                raise ValueError(problem)
        self.num_changes += 1
        for name, tensor in ready.items():
            self.view(name).copy_(tensor)
        self._part_checksums |= {name: tensor_checksum(tensor) for name, tensor in parts.items()}
        self._computed = None

    def incomplete(self) -> list[str]:
        """Return, and forget, the quantised weights of which only some parts have come."""
        missing = self._assembler.incomplete()
        self._assembler.forget()
        return missing

    def load(self, folder: str | Path) -> None:
        """Read a complete Hugging Face folder (one or several safetensors files).

        Raises: ValueError when the folder is incomplete or of another model; the weights are then unchanged.
        """
        sources = _tensor_files(Path(folder))
        if any(map(self._assembler.is_part, sources)):
            self._load_quantized(folder, sources)
            return
        missing = [name for name in self.layout if name not in sources]
        if missing:
            raise ValueError(f"{folder}: {len(missing)} weights missing, first {missing[0]!r}")
        for name, shape in _shapes(sources, self.layout):
            problem = self.problem_with(name, shape)
            if problem:
                raise ValueError(f"{folder}: {problem}")
        self.num_changes += 1
        for path, names in _by_file(sources, self.layout).items():
            with open_safetensors(path) as file:
                for name in names:
                    self.view(name).copy_(file.get_tensor(name))
        self._computed = None

    def _load_quantized(self, folder: str | Path, sources: dict[str, Path]) -> None:
        """Read a folder of quantised weights: everything is assembled before anything changes."""
        wanted = [part for name in self.layout for part in self._assembler.names_of(name)]
        missing = [name for name in wanted if name not in sources]
        if missing:
            raise ValueError(f"{folder}: {len(missing)} weights missing, first {missing[0]!r}")
        tensors = {}
        for path, names in _by_file(sources, wanted).items():
            with open_safetensors(path) as file:
                tensors.update({name: file.get_tensor(name) for name in names})
        self._assembler.forget()
        self.assign(tensors)

    def checksums(self) -> dict[str, str]:
        """Return a checksum per Hugging Face name; equal tensors of equal dtype have equal checksums.

        A quantised weight is told by its parts, as they came.
        """
        plain = {name: tensor_checksum(self.view(name)) for name in self.layout if not self._assembler.is_covered(name)}
        return plain | self._part_checksums

    def take_snapshot(self) -> None:
        """Keep a copy of all stored tensors for `differing_from_snapshot`."""
        self._require_resident()
        self._snapshot = {key: tensor.clone() for key, tensor in self.stored.items()}

    def scramble(self) -> None:
        """Overwrite every weight with noise, so that an update that leaves one out shows."""
        self.num_changes += 1
        self._part_checksums = {}
        for tensor in self.stored.values():
            tensor.copy_(torch.rand(tensor.shape, device=tensor.device))
        self._computed = None

    def differing_from_snapshot(self) -> list[str]:
        """Return the names whose tensors are not bit-equal to the snapshot.

        Raises: ValueError when no snapshot was taken.
        """
        if self._snapshot is None:
            raise ValueError("compare before snapshot: nothing to compare with")
        different = []
        for name, at in self.layout.items():
            if not torch.equal(self._snapshot[at.stored][at.start : at.end], self.view(name)):
                different.append(name)
        return different

    def release(self) -> None:
        """Give the memory back; contents are kept aside. Readers must fetch stored tensors again after `restore`."""
        if self._stash is None:
            self._stash = WeightStash(self.stored)
            self.stored, self._computed = {}, None

    def restore(self) -> None:
        """Take the memory back, with the contents that `release` kept."""
        if self._stash is not None:
            self.stored, self._stash = self._stash.restore(), None

    def _require_resident(self) -> None:
        if self._stash is not None:
            raise ValueError("the weights are released: call /resume_memory_occupation first")

    def _canonical(self, name: str) -> str:
        if name == TIED_HEAD and self.config.tied_embeddings:
            return "model.embed_tokens.weight"
        return name


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor in `folder`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors file there")
    sources = {}
    for path in files:
        with open_safetensors(path) as file:
            sources.update(dict.fromkeys(file.keys(), path))
    return sources


def _by_file(sources: dict[str, Path], names) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name in names:
        files.setdefault(sources[name], []).append(name)
    return files


def _shapes(sources: dict[str, Path], names) -> Iterator[tuple[str, list[int]]]:
    for path, wanted in _by_file(sources, names).items():
        with open_safetensors(path) as file:
            for name in wanted:
                yield name, file.get_slice(name).get_shape()
