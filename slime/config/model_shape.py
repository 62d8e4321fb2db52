"""The model's shape: Megatron's architecture flags against, and filled from, the checkpoint's config.json.

Invariants: a flag that was given is compared, never changed; one that was not given is filled for known families; all
mismatches come in one error. Nothing of transformers is imported and no weight is read.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from slime.config import expert_shape, quantized_config
from slime.config.registry import spelling
from slime.config.spec import UserError
from slime.config.status import MODEL_TYPES

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

#: Attributes that follow from the family rather than from one key of config.json.
SWITCHES = (
    "normalization",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "use_rope_scaling",
    "moe_router_score_function",
    "moe_router_pre_softmax",
)


def read_model_config(folder: str, flag: str) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder and make sure that a tokenizer lies beside it.

    Raises: UserError naming the flag, the folder and what is missing.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{flag} {folder}: no such folder (download the model first; names on a hub are not resolved)")
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise UserError(f"{flag} {folder}: holds no config.json, so it is not a Hugging Face model folder")
    if not any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER_FILES):
        raise UserError(f"{flag} {folder}: holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{flag} {folder}: config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{flag} {folder}: config.json is not a JSON object")
    return config


def is_hf_folder(path: str | None) -> bool:
    """Say whether a folder looks like a Hugging Face model."""
    return bool(path) and os.path.isfile(os.path.join(path, "config.json"))


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Give the language part of a config, which some models nest."""
    return config.get("text_config") or config


def rope_base(config: dict[str, Any]) -> float | None:
    """Give the rotary base; newer configs keep it in rope_parameters."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        return parameters["rope_theta"]
    return config.get("rope_theta")


def _rope_kind(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Give the kind of rotary embedding and its parameters."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling.get("rope_type") or scaling.get("type") or "default", scaling


def unsupported_variants(config: dict[str, Any]) -> list[str]:
    """Name what a config of a known family asks for and the trainer does not have."""
    text = text_part(config)
    kind, scaling = _rope_kind(text)
    found = []
    if text.get("mlp_bias") or (text.get("attention_bias") and text["model_type"] != "qwen2"):
        found.append("mlp_bias or attention_bias is set: biased linear layers are not built yet")
    if text.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {text['hidden_act']!r}: only silu is built")
    if text.get("use_sliding_window"):
        found.append("use_sliding_window is set: sliding windows are not built yet")
    if kind not in ("default", "llama3"):
        found.append(f"rope type is {kind!r}: only default and llama3 are built")
    factors = [scaling.get(key) for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")]
    if kind == "llama3" and factors != [1.0, 4.0, 8192]:
        found.append(f"llama3 rope factors and context are {factors}: only 1, 4 and 8192 are built")
    quantization = (
        quantized_config.unsupported(config["quantization_config"]) if config.get("quantization_config") else None
    )
    return found + expert_shape.unsupported(text) + ([quantization] if quantization else [])


def shape_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """Translate a Qwen2, Qwen3, Qwen3-MoE or Llama config.json into Megatron's attributes."""
    text = text_part(config)
    family = text["model_type"]
    heads = text["num_attention_heads"]
    kind, scaling = _rope_kind(text)
    kv_heads = text.get("num_key_value_heads") or heads
    return {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": text["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": kv_heads != heads,
        "num_query_groups": kv_heads,
        "kv_channels": text.get("head_dim") or text["hidden_size"] // heads,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text.get("max_position_embeddings"),
        "normalization": "RMSNorm",
        "norm_epsilon": text.get("rms_norm_eps", 1e-6),
        "rotary_base": rope_base(text) or 10000,
        "rotary_percent": 1.0,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family in ("qwen3", "qwen3_moe"),
        "untie_embeddings_and_output_weights": not tied(config),
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": scaling.get("factor", 8.0) if kind == "llama3" else 8.0,
        **(expert_shape.expert_shape(text) if expert_shape.has_experts(text) else {}),
    }


def tied(config: dict[str, Any]) -> bool:
    """Say whether input and output embeddings are one tensor; Llama and Qwen default to False, others to True."""
    text = text_part(config)
    value = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return text.get("model_type") not in MODEL_TYPES if value is None else value


def _expected(config: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Map attributes to (config.json key, value) for everything that both sides name."""
    text = text_part(config)
    pairs = {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        "norm_epsilon": "rms_norm_eps",
        "kv_channels": "head_dim",
        "num_query_groups": "num_key_value_heads",
        "moe_router_topk": "num_experts_per_tok",
    }
    if expert_shape.has_experts(text) and all(expert_shape.layer_pattern(text)):
        del pairs["ffn_hidden_size"]  # no layer has an ordinary MLP
    found = {dest: (key, text[key]) for dest, key in pairs.items() if text.get(key) is not None}
    if expert_shape.num_experts(text) is not None:
        found["num_experts"] = ("num_experts", expert_shape.num_experts(text))
    if rope_base(text) is not None:
        found["rotary_base"] = ("rope_theta", rope_base(text))
    found["untie_embeddings_and_output_weights"] = ("not tie_word_embeddings", not tied(config))
    return found


def check_shape(args: argparse.Namespace, given: set[str], config: dict[str, Any]) -> list[str]:
    """Compare given flags with config.json; one line per mismatch."""
    problems = []
    for dest, (key, value) in _expected(config).items():
        mine = getattr(args, dest)
        if dest not in given or mine is None:
            continue
        is_close = isinstance(value, int | float) and abs(mine - value) <= 1e-9 * max(1.0, abs(value))
        if mine != value and not is_close:
            problems.append(f"{spelling(dest)} is {mine}, {key} in config.json is {value}")
    return problems


def check_switches(args: argparse.Namespace, given: set[str], shape: dict[str, Any]) -> list[str]:
    """Compare given switches with what the family of the model has; one line per mismatch."""
    problems = [
        f"{spelling(dest)} makes {dest} {getattr(args, dest)}, this model has {shape[dest]}"
        for dest in SWITCHES
        if dest in given and dest in shape and getattr(args, dest) != shape[dest]
    ]
    return problems + _check_experts(args, given, shape)


def _check_experts(args: argparse.Namespace, given: set[str], shape: dict[str, Any]) -> list[str]:
    """Compare which layers have experts."""
    if "num_experts" not in shape:
        has_none = "num_experts" in given and args.num_experts
        return [f"--num-experts is {args.num_experts}, this model has none"] if has_none else []
    if "moe_layer_freq" not in given:
        return []
    mine, theirs = args.moe_layer_freq, shape["moe_layer_freq"]
    if isinstance(mine, int):
        mine = [int(layer % mine == 0) for layer in range(len(theirs))]
    return [] if mine == theirs else [f"--moe-layer-freq is {mine}, the model's layers with experts are {theirs}"]


def _refuse_mismatch(problems: list[str], folder: str) -> None:
    """Raise UserError with every mismatch, if there is any."""
    if problems:
        raise UserError(f"the model flags do not fit {folder}: " + "; ".join(problems))


def fill_shape(args: argparse.Namespace, given: set[str], notes: list[str], folder: str) -> None:
    """Check the architecture flags against config.json and fill the ones that were not given.

    Raises: UserError with every mismatch, or when the family cannot be read and flags are missing.
    """
    config = args.model_arch
    problems = check_shape(args, given, config)
    family = text_part(config).get("model_type")
    if family not in MODEL_TYPES:
        _refuse_mismatch(problems, folder)
        missing = [d for d in ("num_layers", "hidden_size", "num_attention_heads") if getattr(args, d) is None]
        if missing:
            flags = ", ".join(spelling(dest) for dest in missing)
            raise UserError(f"model_type {family!r} in {folder}/config.json: give {flags} (scripts/models/*.sh)")
        if args.vocab_size is None:
            args.vocab_size = text_part(config).get("vocab_size")
        return
    try:
        shape = shape_from_config(config)
    except KeyError as error:
        raise UserError(f"{folder}/config.json has no {error.args[0]!r}") from None
    variants = unsupported_variants(config)
    if variants:
        raise UserError(f"{folder}/config.json: " + "; ".join(variants))
    _refuse_mismatch(problems + check_switches(args, given, shape), folder)
    filled = [dest for dest in shape if dest not in given]
    for dest in filled:
        setattr(args, dest, shape[dest])
    if "vocab_size" in given and args.vocab_size != shape["vocab_size"]:
        notes.append(f"--vocab-size is {args.vocab_size}, config.json of the model says {shape['vocab_size']}")
    if "num_layers" in filled:
        notes.append(
            f"model shape read from {folder}/config.json ({family}, {args.num_layers} layers, hidden size {args.hidden_size})"
        )
