"""What a Hugging Face config.json says about a decoder, in the names of Megatron's arguments.

One table row per model type. Used when the architecture flags are not given, and to check them when they are.
Does not know torch or Megatron.
"""

from __future__ import annotations

from slime.config import expert_shape

FAMILIES = {
    "qwen2": {"add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
    "qwen3_moe": {"add_qkv_bias": False, "qk_layernorm": True},
    "llama": {"add_qkv_bias": False, "qk_layernorm": False},
}


def family_of(hf_config: dict) -> str:
    """Return the model type, refusing those without a converter.

    Raises: ValueError naming the supported ones.
    """
    name = hf_config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"model_type {name!r} of the Hugging Face config is not supported; known: {sorted(FAMILIES)}")
    return name


def architecture_args(hf_config: dict) -> dict:
    """Return the Megatron arguments that build this model.

    >>> a = architecture_args({"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    ...     "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10, "rms_norm_eps": 1e-6,
    ...     "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu"})
    >>> a["kv_channels"], a["num_query_groups"], a["untie_embeddings_and_output_weights"], a["rotary_base"]
    (4, 1, False, 1000000.0)
    """
    family = FAMILIES[family_of(hf_config)]
    heads = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or heads
    _refuse_variants(hf_config)
    return {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        "vocab_size": hf_config["vocab_size"],
        "normalization": "RMSNorm",
        "norm_epsilon": hf_config["rms_norm_eps"],
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": family["add_qkv_bias"],
        "qk_layernorm": family["qk_layernorm"],
        "untie_embeddings_and_output_weights": not hf_config.get("tie_word_embeddings", False),
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        **_rope(hf_config),
        **(expert_shape.expert_shape(hf_config) if expert_shape.has_experts(hf_config) else {}),
    }


def _refuse_variants(hf_config: dict) -> None:
    biased = hf_config.get("mlp_bias") or (hf_config.get("attention_bias") and hf_config["model_type"] != "qwen2")
    if biased:
        raise ValueError(
            "mlp_bias or attention_bias of the Hugging Face config is set: biased linear layers are not supported"
        )
    if hf_config.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"hidden_act {hf_config['hidden_act']!r} of the Hugging Face config is not supported (silu is)"
        )
    if hf_config.get("use_sliding_window"):
        raise ValueError("use_sliding_window of the Hugging Face config is set: sliding windows are not supported")
    if expert_shape.unsupported(hf_config):
        raise ValueError("the Hugging Face config is not supported: " + "; ".join(expert_shape.unsupported(hf_config)))


def _rope(hf_config: dict) -> dict:
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope type {kind!r} of the Hugging Face config is not supported (default and llama3 are)")
    scaled = kind == "llama3"
    standard = (rope.get("low_freq_factor"), rope.get("high_freq_factor"), rope.get("original_max_position_embeddings"))
    if scaled and standard != (1.0, 4.0, 8192):
        raise ValueError(f"llama3 rope scaling with factors and context {standard} is not supported, (1, 4, 8192) is")
    return {
        "rotary_base": rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0,
        "use_rope_scaling": scaled,
        "rope_scaling_factor": rope.get("factor", 8.0) if scaled else 8.0,
    }
