"""Fill a Megatron model from a Hugging Face folder.

Invariants: every parameter of this rank is written, a critic's value head excepted; every tensor of the folder belongs to the model or is on the short
list of derived ones; a shape that does not fit is an error that names the tensor. Values are cast to the model's dtype.
"""

from __future__ import annotations

import torch

from slime.backends.megatron_utils.hf_to_megatron.reader import HfCheckpoint
from slime.backends.megatron_utils.layer_spec import layers_with_experts
from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.parameters import named_parameters, shard_dim, tensor_group
from slime.backends.megatron_utils.value_head import is_part_of_head
from slime.backends.megatron_utils.weight_names import Rule, rule_for, tensor_shard, to_megatron

_DERIVED_SUFFIX = "rotary_emb.inv_freq"


def load_hf_weights(model: torch.nn.Module, folder: str) -> None:
    """Copy the weights of `folder` into this rank's parameters, cutting shards and padding the vocabulary.

    Raises: ValueError naming missing, unexpected or misshapen tensors.
    """
    checkpoint = HfCheckpoint(folder)
    config = unwrap(model).config
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if is_part_of_head(unwrap(model), name):
                continue
            rule = rule_for(name)
            whole = to_megatron(rule.kind, [checkpoint.tensor(x) for x in rule.hf_names], config)
            _copy(parameter, whole, rule, name)
    _refuse_unexpected(model, checkpoint)


def _copy(parameter: torch.Tensor, whole: torch.Tensor, rule: Rule, name: str) -> None:
    dim, group = shard_dim(parameter), tensor_group(name)
    size = group.size() if dim is not None else 1
    if rule.kind == "vocab":
        whole = _pad_rows(whole, parameter.shape[0] * size)
    shard = tensor_shard(rule.kind, whole, dim or 0, group.rank() if size > 1 else 0, size)
    if shard.shape != parameter.shape:
        raise ValueError(
            f"{' + '.join(rule.hf_names)} makes {tuple(shard.shape)} for the Megatron parameter {name}, which is "
            f"{tuple(parameter.shape)}: the checkpoint and the model arguments describe different models"
        )
    parameter.data.copy_(shard)


def _pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    if weight.shape[0] >= rows:
        return weight
    return torch.cat([weight, weight.new_zeros(rows - weight.shape[0], *weight.shape[1:])])


def _refuse_unexpected(model: torch.nn.Module, checkpoint: HfCheckpoint) -> None:
    bare = unwrap(model)
    known = set(expected_names(bare.config, tied=bare.share_embeddings_and_output_weights))
    if bare.share_embeddings_and_output_weights:
        known.add("lm_head.weight")
    extra = sorted(n for n in checkpoint.names() - known if not n.endswith(_DERIVED_SUFFIX))
    if extra:
        raise ValueError(f"{len(extra)} tensors of {checkpoint.folder} do not belong to the model, e.g. {extra[:3]}")


def expected_names(config, tied: bool) -> list[str]:
    """Return the Hugging Face names of the whole model, in file order."""
    parts = ["input_layernorm.weight", "self_attention.linear_qkv.weight"]
    parts += ["self_attention.linear_qkv.bias"] if config.add_qkv_bias or config.add_bias_linear else []
    parts += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] if config.qk_layernorm else []
    parts += ["self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"]
    parts += ["self_attention.linear_proj.bias"] if config.add_bias_linear else []
    dense, sparse = _mlp_parts(config), _expert_parts(config)
    names = ["embedding.word_embeddings.weight"]
    for i, has_experts in enumerate(layers_with_experts(config)):
        names += [f"decoder.layers.{i}.{part}" for part in parts + (sparse if has_experts else dense)]
    names += ["decoder.final_layernorm.weight"] + ([] if tied else ["output_layer.weight"])
    return [hf for name in names for hf in rule_for(name).hf_names]


def _mlp_parts(config) -> list[str]:
    kinds = ("weight", "bias") if config.add_bias_linear else ("weight",)
    return [f"mlp.linear_fc{i}.{kind}" for kind in kinds for i in (1, 2)]


def _expert_parts(config) -> list[str]:
    """Return the parameters of a layer with experts; [] for a model without."""
    if config.num_moe_experts is None:
        return []
    router = ["mlp.router.weight"] + (["mlp.router.expert_bias"] if config.moe_router_enable_expert_bias else [])
    return router + [f"mlp.experts.linear_fc{i}.weight{e}" for e in range(config.num_moe_experts) for i in (1, 2)]
