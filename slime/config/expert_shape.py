"""What a config.json of the Qwen3-MoE family says about its experts, in the names of Megatron's arguments.

Knows no flags and no torch; read by the checks of the arguments and by the model builder.
"""

from __future__ import annotations

from typing import Any


def has_experts(config: dict[str, Any]) -> bool:
    """Say whether the (text) config describes a mixture of experts of a family that is built."""
    return config.get("model_type") == "qwen3_moe"


def num_experts(config: dict[str, Any]) -> int | None:
    """Give the number of experts; newer transformers write it under another name."""
    return config.get("num_experts") or config.get("num_local_experts")


def layer_pattern(config: dict[str, Any]) -> list[int]:
    """Give 1 for every layer with experts, 0 for one with an ordinary MLP.

    >>> layer_pattern({"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    [0, 1, 0, 0]
    """
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])]


def expert_shape(config: dict[str, Any]) -> dict[str, Any]:
    """Translate into Megatron's attributes; the router computes in fp32 unless told otherwise."""
    return {
        "num_experts": num_experts(config),
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": layer_pattern(config),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
    }


def unsupported(config: dict[str, Any]) -> list[str]:
    """Name what the config asks for and the trainer does not have."""
    if not has_experts(config):
        return []
    found = []
    if not num_experts(config):
        found.append("num_experts is missing")
    elif not 1 <= config.get("num_experts_per_tok", 0) <= num_experts(config):
        found.append(f"num_experts_per_tok is {config.get('num_experts_per_tok')} of {num_experts(config)} experts")
    elif config["num_experts_per_tok"] == 1 and config.get("norm_topk_prob"):
        found.append("num_experts_per_tok is 1 with norm_topk_prob: the router would have no gradient")
    if config.get("mlp_only_layers") and max(config["mlp_only_layers"]) >= config.get("num_hidden_layers", 0):
        found.append(f"mlp_only_layers is {config['mlp_only_layers']}, beyond the last layer")
    return found
