"""The adapters' parameters and what they add to the outputs of Megatron's linear layers.

A fused layer (q/k/v, gate/up) has separate factors for each Hugging Face projection, so that PEFT's format is exact.
With h = A x the addition is scaling * B h. Under tensor parallelism the large side of each factor is cut as the layer is:
B of a column-parallel layer, A of a row-parallel one; the other factor is whole on every rank, and only h, `rank` numbers per
token, is communicated. With several adapters every token goes through its own alone: h of the others is masked.
Invariants: the parameters live in one module, `model.adapters`, under names that hold on every layout; the layers' own
names and shapes stay; whole factors are drawn from the seed, so their start does not depend on the layout.
Letters: T tokens of this rank's stream, K adapters, P projections of a layer, r rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.parameters import named_parameters
from slime.backends.megatron_utils.weight_names import rule_for, tensor_shard

PREFIX = "adapters."


@dataclass(frozen=True)
class LoraSettings:
    """names: adapters trained together. targets: last parts of Hugging Face module names."""

    names: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    seed: int

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def parameter_key(adapter: str, module: str, factor: str) -> str:
    """Name of a factor inside `model.adapters`; torch wants no dots in it.

    >>> parameter_key("actor", "model.layers.0.mlp.up_proj", "A")
    'actor/model/layers/0/mlp/up_proj/lora_A'
    """
    return f"{adapter}/{module.replace('.', '/')}/lora_{factor}"


class Adapters(torch.nn.Module):
    """All adapters of one model chunk."""

    def __init__(self, settings: LoraSettings):
        super().__init__()
        self.settings = settings
        self.modules_cut: dict[str, Site] = {}  # Hugging Face module -> the layer that computes it
        self.of_token: torch.Tensor | None = None  # [T] number of each token's adapter; None with one adapter

    def factor(self, adapter: str, module: str, factor: str) -> torch.nn.Parameter:
        return self._parameters[parameter_key(adapter, module, factor)]

    def factors(self, adapter: str) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
        """Yield (Hugging Face module, "A" or "B", parameter) of one adapter."""
        for module in self.modules_cut:
            for factor in ("A", "B"):
                yield module, factor, self.factor(adapter, module, factor)

    def token_mask(self, like: torch.Tensor) -> torch.Tensor | None:
        """[T, 1, 1, K, 1]: one where the token belongs to the adapter; None where all tokens belong to the only one."""
        count = len(self.settings.names)
        if count == 1:
            return None
        assert self.of_token is not None, "several adapters, and nothing says which token belongs to which"
        return F.one_hot(self.of_token, count).to(like.dtype)[:, None, None, :, None]

    @torch.no_grad()
    def clear(self) -> None:
        """Make every adapter add nothing: the model is its base."""
        for name, parameter in self._parameters.items():
            if name.endswith("lora_B"):
                parameter.zero_()


class Site:
    """One linear layer and the projections of it that have adapters.

    Args:
        kind: how the projections make up the layer's output (`weight_names`): copy, qkv or gate_up.
        modules: Hugging Face modules of all its projections; targeted: those with adapters.
    """

    def __init__(self, owner: Adapters, linear: torch.nn.Module, kind: str, modules: tuple[str, ...], config):
        from megatron.core.tensor_parallel import RowParallelLinear

        self.owner, self.kind, self.modules, self.config = owner, kind, modules, config
        self.targeted = [m for m in modules if m.rpartition(".")[2] in owner.settings.targets]
        self.is_row = isinstance(linear, RowParallelLinear)
        self.is_expert = linear.is_expert
        self.group = linear.tp_group
        self.tensor_ranks = 1 if self.is_expert else self.group.size()
        self.is_sequence_parallel = self.tensor_ranks > 1 and linear.sequence_parallel
        self.weight = linear.weight

    # ---- parameters -----------------------------------------------------------------------------------------------

    def add_parameters(self) -> None:
        for module, rows in zip(self.modules, self._output_rows(), strict=True):
            if module not in self.targeted:
                continue
            self.owner.modules_cut[module] = self
            for adapter in self.owner.settings.names:
                self._add(adapter, module, "A", self._first_a(adapter, module), 1 if self.is_row else None)
                b = self.weight.new_zeros(rows, self.owner.settings.rank)
                self._add(adapter, module, "B", b, None if self.is_row else 0)

    def _output_rows(self) -> list[int]:
        """Rows of this rank's part of the layer's weight that each projection has."""
        rows = self.weight.shape[0]
        if self.kind == "qkv":
            heads, groups = self.config.num_attention_heads, self.config.num_query_groups
            each = rows // (heads + 2 * groups)
            return [each * heads, each * groups, each * groups]
        return [rows // len(self.modules)] * len(self.modules)

    def _first_a(self, adapter: str, module: str) -> torch.Tensor:
        """This rank's part of a uniform draw as PEFT makes it (Kaiming with slope sqrt 5)."""
        settings, width = self.owner.settings, self.weight.shape[1] * (self.tensor_ranks if self.is_row else 1)
        text = f"{settings.seed}/{adapter}/{module}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        whole = torch.empty(settings.rank, width).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
        whole /= math.sqrt(width)
        rank = self.group.rank() if self.is_row and self.tensor_ranks > 1 else 0
        part = tensor_shard("copy", whole, 1, rank, self.tensor_ranks) if self.is_row else whole
        return part.to(self.weight)

    def _add(self, adapter: str, module: str, factor: str, value: torch.Tensor, dim: int | None) -> None:
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        parameter = torch.nn.Parameter(value.clone(memory_format=torch.contiguous_format))
        # An expert's factors differ between tensor ranks, so that their norm counts on each.
        set_tensor_model_parallel_attributes(parameter, dim is not None or self.is_expert, dim or 0, 1)
        # Whole on every rank but computed from a part of the tokens: Megatron sums such gradients over tensor ranks.
        parameter.sequence_parallel = self.is_sequence_parallel and dim is None
        parameter.allreduce = self.weight.allreduce  # False: an expert's, reduced over the ranks that hold it
        self.owner.register_parameter(parameter_key(adapter, module, factor), parameter)

    # ---- forward --------------------------------------------------------------------------------------------------

    def __call__(self, linear, inputs, output):
        """Forward hook: the layer's output plus the adapters'."""
        return output[0] + self.addition(inputs[0]), output[1]

    def addition(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapters add for input x [T, 1, in] (a part of T under sequence parallelism)."""
        settings, names = self.owner.settings, self.owner.settings.names
        hidden = self._down(x)
        mask = self.owner.token_mask(hidden)
        if mask is not None and self.is_row:
            hidden = self._masked(hidden, mask)
        hidden = self._communicate(hidden)
        if mask is not None and not self.is_row:
            hidden = self._masked(hidden, mask)
        parts = dict(zip(self.targeted, hidden.chunk(len(self.targeted), dim=-1), strict=True))
        added = []
        for module, rows in zip(self.modules, self._output_rows(), strict=True):
            if module in parts:
                b = torch.cat([self.owner.factor(name, module, "B") for name in names], dim=1)
                added.append(F.linear(parts[module] * settings.scaling, b))
            else:
                added.append(hidden.new_zeros(*hidden.shape[:-1], rows))
        return self._join(added)

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 1, P * K * r], projections outermost."""
        names = self.owner.settings.names
        factors = [[self.owner.factor(name, module, "A") for name in names] for module in self.targeted]
        if not (self.owner.training and self.owner.settings.dropout):
            return F.linear(x, torch.cat([a for row in factors for a in row]))
        with self._dropout_state():  # each projection drops inputs of its own, as in PEFT
            dropped = [F.dropout(x, self.owner.settings.dropout) for _ in self.targeted]
        return torch.cat([F.linear(d, torch.cat(row)) for d, row in zip(dropped, factors, strict=True)], dim=-1)

    def _dropout_state(self):
        """Inputs that are cut over tensor ranks drop by a random state of each rank, whole ones by the common one."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        is_cut = self.tensor_ranks > 1 and (self.is_row or self.is_sequence_parallel)
        return get_cuda_rng_tracker().fork() if is_cut else contextlib.nullcontext()

    def _masked(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        settings = self.owner.settings
        split = hidden.view(*hidden.shape[:-1], len(self.targeted), len(settings.names), settings.rank)
        return (split * mask).view_as(hidden)

    def _communicate(self, hidden: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.tensor_ranks == 1:
            return hidden
        if self.is_row:
            whole = mappings.reduce_scatter_to_sequence_parallel_region
            call = whole if self.is_sequence_parallel else mappings.reduce_from_tensor_model_parallel_region
        else:
            whole = mappings.gather_from_sequence_parallel_region
            call = whole if self.is_sequence_parallel else mappings.copy_to_tensor_model_parallel_region
        return call(hidden, group=self.group)

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Outputs of the projections in the order of the layer's output."""
        if self.kind != "qkv":
            return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        groups = self.config.num_query_groups // self.tensor_ranks
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], dim=-1).flatten(-2)


def settings_of(args) -> LoraSettings:
    """Return what the flags say about adapters."""
    return LoraSettings(
        tuple(args.lora_adapters),
        args.lora_rank,
        args.lora_alpha,
        args.lora_dropout,
        tuple(args.target_modules),
        args.seed,
    )


def attach(args, model: torch.nn.Module) -> Adapters:
    """Freeze a bare model chunk and put adapters on its targeted layers.

    Raises: ValueError when a target names no layer of the model.
    """
    model.requires_grad_(False)
    adapters = Adapters(settings_of(args))
    for linear, rule in _linears(model):
        modules = tuple(name.removesuffix(".weight") for name in rule.hf_names)
        site = Site(adapters, linear, rule.kind, modules, model.config)
        if not site.targeted:
            continue
        site.add_parameters()
        linear.register_forward_hook(site)
    _check_targets(adapters)
    model.adapters = adapters
    if model.pre_process:
        model.embedding.register_forward_hook(_start_of_gradient)
    if len(adapters.settings.names) > 1:
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(_TokenOwners(adapters), with_kwargs=True)
    return adapters


def _linears(model: torch.nn.Module) -> Iterator[tuple]:
    """Yield (linear layer, rule of its weight) of all transformer layers."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    names = {id(parameter): name for name, parameter in named_parameters(model)}
    for module in model.decoder.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            yield module, rule_for(names[id(module.weight)])


def _check_targets(adapters: Adapters) -> None:
    found = {module.rpartition(".")[2] for module in adapters.modules_cut}
    missing = [target for target in adapters.settings.targets if target not in found]
    if missing:
        raise ValueError(f"--target-modules {' '.join(missing)}: the model has no such projection")


def _start_of_gradient(module, inputs, output):
    """Recomputed layers pass gradients on only if their input asks for some, which a frozen embedding's does not."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


class _TokenOwners:
    """Forward pre-hook of a layer: the adapters learn which token is whose, also when the layer is recomputed."""

    def __init__(self, adapters: Adapters):
        self.adapters = adapters

    def __call__(self, layer, args, kwargs):
        self.adapters.of_token = kwargs["packed_seq_params"].adapter_of_token


def adapters_of(model: torch.nn.Module) -> Adapters | None:
    """Return the adapters of a (wrapped) model chunk, None when it has none."""
    return unwrap(model)._modules.get("adapters")


def trained_parameters(model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Return the parameters that training can change: the adapters', or all."""
    adapters = adapters_of(model)
    return (adapters if adapters is not None else model).parameters()


def clear(model: list) -> None:
    """Make the adapters of all chunks add nothing."""
    for chunk in model:
        adapters_of(chunk).clear()
