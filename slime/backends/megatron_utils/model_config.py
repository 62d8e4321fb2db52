"""Megatron's TransformerConfig and the model's vocabulary from the arguments.

Fields whose name is also an argument are taken as they are; the ones that Megatron spells differently on the command
line are in `_RENAMED`. Without architecture flags (`num_layers` unset) the Hugging Face config.json decides.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.architecture import architecture_args
from slime.backends.megatron_utils.layer_spec import uses_transformer_engine
from slime.utils import device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# TransformerConfig field -> argument
_RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
# Kernels that exist on a GPU only; elsewhere they are off, whatever the flags say.
_GPU_FUSIONS = (
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion",
    "tp_comm_overlap",
)
# Kernels for mixtures of experts that need Transformer Engine.
_EXPERT_KERNELS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")


def resolve_architecture(args) -> None:
    """Fill the architecture arguments from `args.model_arch` when `--num-layers` was not given."""
    if args.num_layers is None:
        for name, value in architecture_args(args.model_arch).items():
            setattr(args, name, value)


def padded_vocab_size(args) -> int:
    """Return the number of embedding rows: an explicit size, or the vocabulary rounded up for every tensor rank."""
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil(args.vocab_size / multiple) * multiple


def transformer_config(args):
    """Return the TransformerConfig of the model described by `args`."""
    from megatron.core.transformer import TransformerConfig

    given = vars(args)
    values = {}
    for field in dataclasses.fields(TransformerConfig):
        name = _RENAMED.get(field.name, field.name)
        if field.init and name in given and not (given[name] is None and field.default is not None):
            values[field.name] = _typed(field.name, given[name])
    if values.get("moe_token_dispatcher_type", "allgather") == "allgather":
        values["moe_token_dispatcher_type"] = "alltoall"  # all-gather cannot take sequences of different lengths
    values.update(_precision(args), **_architecture(args), **_machine(), **_lean_activation(args))
    return TransformerConfig(**values)


def _typed(field_name: str, value):
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend[value] if field_name == "attention_backend" and isinstance(value, str) else value


def _precision(args) -> dict:
    dtype = DTYPES[args.precision]
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp16": args.precision == "fp16",
        "bf16": args.precision == "bf16",
    }


def _architecture(args) -> dict:
    return {
        "activation_func": F.silu if args.swiglu else F.gelu,
        "num_query_groups": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "variable_seq_lengths": True,
        "calculate_per_token_loss": args.calculate_per_token_loss,
        # Megatron's interleaved schedule pairs the messages of two stages right only when it overlaps them.
        "batch_p2p_comm": args.virtual_pipeline_model_parallel_size is None,
        "overlap_p2p_comm": args.virtual_pipeline_model_parallel_size is not None,
    }


def _machine() -> dict:
    if uses_transformer_engine():
        return {"gradient_accumulation_fusion": False}
    without = dict.fromkeys(_EXPERT_KERNELS, False)
    if device.has_accelerator():
        return {"gradient_accumulation_fusion": False, "apply_rope_fusion": False, **without}
    return {"use_cpu_initialization": True, **dict.fromkeys(_GPU_FUSIONS, False), **without}


def _lean_activation(args) -> dict:
    """Have the MLP hand gate and up to one function together (`local_layers.swiglu`), where the layers are ours.

    A user's model may have another activation in its config, which nothing would read then.
    """
    is_users = args.spec or args.custom_model_provider_path
    is_ours = not device.has_accelerator() and args.swiglu and not args.num_experts and not is_users
    return {"use_te_activation_func": True} if is_ours else {}
