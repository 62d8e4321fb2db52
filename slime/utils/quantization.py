"""Quantised weights in the forms of Hugging Face checkpoints: fp8 in blocks, and int4 of compressed-tensors.

`scheme_of` reads a config.json's quantization_config; a scheme turns a weight into its parts and parts into the weight:

* fp8 (e4m3): `weight` and one fp32 `weight_scale_inv` per block, [ceil(rows / r), ceil(columns / c)]; without a block size one
  `weight_scale` [1]. Value = fp8 * scale, scale = absmax / 448.
* int4: `weight_packed` int32 [rows, ceil(columns / 8)], eight numbers each, the first in the lowest bits, stored plus 8;
  `weight_scale` [rows, groups]; `weight_shape` int64 [2]; `weight_zero_point` int32 [ceil(rows / 8), groups], packed along the rows,
  where it is not symmetric. Value = (int4 - zero point) * scale.

Anything else is refused. Invariants: a scheme covers a weight by its name alone; parts carry names that begin with the weight's.
Does not know models or transports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slime.config import quantized_config

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
#: Linear layers that fp8 checkpoints quantise; embeddings, output layer, norms and routers stay.
FP8_MODULES = frozenset(
    """q_proj k_proj v_proj o_proj gate_proj up_proj down_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj wq_b wk
    in_proj_qkv in_proj_z out_proj""".split()
)
_WEIGHT = ".weight"
_NIBBLES = 8


class Scheme(Protocol):
    """How the weights that `covers` says are stored."""

    def covers(self, name: str) -> bool: ...

    def part_names(self, name: str) -> list[str]: ...

    def quantize(self, name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]: ...

    def dequantize(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor: ...


def scheme_of(config: dict[str, Any] | None, where: str) -> Scheme | None:
    """Return the scheme of a config.json's quantization_config, None without one.

    Raises: ValueError naming `where` and what is not supported.
    """
    if not config:
        return None
    problem = quantized_config.unsupported(config)
    if problem is not None:
        raise ValueError(f"{where}: {problem}")
    if config["quant_method"] == "fp8":
        block = config.get("weight_block_size")
        skipped = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        return Fp8(None if block is None else (int(block[0]), int(block[1])), tuple(skipped))
    weights = quantized_config.int4_weights(config)
    return Int4(weights.get("group_size") or -1, weights.get("symmetric", True), tuple(config.get("ignore") or ()))


def _module(name: str) -> str:
    return name.removesuffix(_WEIGHT)


def _is_ignored(module: str, rules: Iterable[str]) -> bool:
    """Whether a rule names the module: exactly, as a beginning, or as a pattern after `re:`."""
    return any(
        re.match(rule[3:], module) if rule.startswith("re:") else module == rule or module.startswith(f"{rule}.")
        for rule in rules
    )


# ---- fp8 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8:
    """block: rows and columns that share a scale, None for one scale per weight. skipped: modules that stay."""

    block: tuple[int, int] | None
    skipped: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        module = _module(name)
        return (
            name.endswith(_WEIGHT)
            and module.rpartition(".")[2] in FP8_MODULES
            and not _is_ignored(module, self.skipped)
        )

    def part_names(self, name: str) -> list[str]:
        return [name, f"{name}_scale" if self.block is None else f"{name}_scale_inv"]

    def quantize(self, name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        import torch

        value = weight.float()
        if self.block is None:
            scale = (value.abs().max().clamp(min=1e-12) / FP8_MAX).reshape(1)
            spread = scale
        else:
            blocks = _in_blocks(value.abs(), self.block).amax(dim=(1, 3))
            scale = blocks.clamp(min=1e-10) / FP8_MAX
            spread = self._spread(scale, value.shape)
        stored = (value / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return list(zip(self.part_names(name), (stored, scale), strict=True))

    def dequantize(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        stored, scale = (parts[part] for part in self.part_names(name))
        return stored.float() * (scale if self.block is None else self._spread(scale.float(), stored.shape))

    def _spread(self, scale: torch.Tensor, shape) -> torch.Tensor:
        """Scales of blocks as one number per weight."""
        rows, columns = self.block
        return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def _in_blocks(value: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[R, C] as [blocks, rows, blocks, columns]; the last ones are filled up with zeros."""
    import torch.nn.functional as F

    rows, columns = block
    padded = F.pad(value, (0, -value.shape[1] % columns, 0, -value.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


# ---- int4 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int4:
    """group_size: columns that share a scale, -1 for whole rows. ignore: modules that stay."""

    group_size: int
    symmetric: bool
    ignore: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        module = _module(name)
        last = module.rpartition(".")[2]
        is_linear = name.endswith(_WEIGHT) and "norm" not in last and not last.startswith("embed")
        return is_linear and not _is_ignored(module, self.ignore)

    def part_names(self, name: str) -> list[str]:
        parts = ["packed", "scale", "shape"] + ([] if self.symmetric else ["zero_point"])
        return [f"{name}_{part}" for part in parts]

    def quantize(self, name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        import torch

        groups = self._grouped(name, weight.float())
        if self.symmetric:
            scale = groups.abs().amax(-1) / 7.5
            zero = torch.zeros_like(scale)
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale = (high - low) / 15
            zero = (-8 - low / scale.clamp(min=1e-12)).round().clamp(-8, 7)
        # Numbers are rounded by the scale that is stored, in the weight's dtype.
        scale = torch.where(scale == 0, torch.finfo(weight.dtype).eps, scale).to(weight.dtype)
        numbers = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(-8, 7)
        parts = [pack_int4(numbers.flatten(1)), scale, torch.tensor(weight.shape, device=weight.device)]
        parts += [] if self.symmetric else [pack_int4(zero.t()).t().contiguous()]
        return list(zip(self.part_names(name), parts, strict=True))

    def dequantize(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        packed, scale, shape = (parts[part] for part in self.part_names(name)[:3])
        rows, columns = shape.tolist()
        numbers = self._grouped(name, unpack_int4(packed, columns))
        if not self.symmetric:
            zero = unpack_int4(parts[f"{name}_zero_point"].t(), rows).t()
            numbers = numbers - zero[..., None]
        return (numbers * scale.float()[..., None]).flatten(1)

    def _grouped(self, name: str, value: torch.Tensor) -> torch.Tensor:
        size = value.shape[1] if self.group_size < 0 else self.group_size
        if value.shape[1] % size:
            raise ValueError(f"{name} has {value.shape[1]} columns, which int4 groups of {size} do not divide")
        return value.unflatten(1, (-1, size))


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Pack whole numbers -8..7 [R, C] into int32 [R, ceil(C / 8)].

    >>> import torch
    >>> hex(pack_int4(torch.tensor([[-8, -7, 7, 0, 0, 0, 0, -8]])).item() & 0xFFFFFFFF)
    '0x8888f10'
    """
    import torch
    import torch.nn.functional as F

    shifted = F.pad(numbers.to(torch.int64) + 8, (0, -numbers.shape[1] % _NIBBLES)).unflatten(1, (-1, _NIBBLES))
    words = (shifted << (4 * torch.arange(_NIBBLES, device=numbers.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Undo `pack_int4`: float32 [R, columns]."""
    import torch

    words = packed.to(torch.int64)[..., None] >> (4 * torch.arange(_NIBBLES, device=packed.device))
    return ((words & 15) - 8).flatten(1)[:, :columns].float()


# ---- streams ----------------------------------------------------------------------------------------------------------


def quantized(
    named_tensors: Iterable[tuple[str, torch.Tensor]], scheme: Scheme | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with the covered weights as parts, one behind the other."""
    for name, tensor in named_tensors:
        if scheme is not None and scheme.covers(name):
            yield from scheme.quantize(name, tensor)
        else:
            yield name, tensor


class Assembler:
    """Puts parts together again; they may come in any order and in several deliveries."""

    def __init__(self, scheme: Scheme | None, weight_names: Iterable[str]):
        self._scheme = scheme
        covered = [name for name in weight_names if scheme is not None and scheme.covers(name)]
        self._owner = {part: name for name in covered for part in scheme.part_names(name)}
        self._held: dict[str, dict[str, torch.Tensor]] = {}

    def is_part(self, name: str) -> bool:
        """Whether a tensor of this name is a part of a quantised weight."""
        return name in self._owner

    def is_covered(self, name: str) -> bool:
        """Whether the weight of this name comes in parts."""
        return self._scheme is not None and self._scheme.covers(name)

    def names_of(self, weight: str) -> list[str]:
        """Return the names under which a weight comes."""
        return self._scheme.part_names(weight) if self.is_covered(weight) else [weight]

    def take(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is complete now: plain tensors, and weights whose last part has come. Parts are kept as they are: hand over copies.

        Raises: ValueError when parts do not fit together.
        """
        ready = {}
        for name, tensor in tensors.items():
            owner = self._owner.get(name)
            if owner is None:
                ready[name] = tensor
                continue
            parts = self._held.setdefault(owner, {})
            parts[name] = tensor
            if len(parts) == len(self._scheme.part_names(owner)):
                ready[owner] = self._assemble(owner, self._held.pop(owner))
        return ready

    def _assemble(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        try:
            return self._scheme.dequantize(name, parts)
        except (RuntimeError, IndexError) as error:
            shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
            raise ValueError(f"parts of {name} do not fit together: {shapes} ({error})") from None

    def incomplete(self) -> list[str]:
        """Return the weights of which only some parts have come."""
        return sorted(self._held)

    def forget(self) -> None:
        self._held.clear()
