"""The part of a Hugging Face config.json that the forward pass needs, checked once at start.

Invariant: a ModelConfig describes a model that `slime.engine.model` computes exactly; anything else is refused here with
a message that names the field. Knows no tensors except the RoPE frequencies.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from slime.utils.quantization import Scheme, scheme_of

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
MAX_DEFAULT_CONTEXT = 32768


@dataclass(frozen=True)
class ExpertConfig:
    """The mixture-of-experts layers: `layers` says for each layer whether it is one."""

    count: int
    per_token: int
    width: int
    normalised: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder; `experts` is None for a dense one."""

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: dict
    max_positions: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    experts: ExpertConfig | None = None
    quantization: Scheme | None = None
    """How weights come; they are computed with, and held, in the dtype of the engine."""

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def inverse_frequencies(self) -> list[float]:
        """Return the RoPE frequencies (radians per position), [head_dim / 2]."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        kind = self.rope_scaling.get("rope_type", "default")
        if kind == "linear":
            return [f / self.rope_scaling["factor"] for f in plain]
        if kind == "llama3":
            return [_llama3_frequency(f, self.rope_scaling) for f in plain]
        return plain


def load_model_config(model_path: str | Path) -> ModelConfig:
    """Read and check `model_path`/config.json (and generation_config.json for the end-of-sequence ids).

    Raises: ValueError when the folder holds no model that this engine can run.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model-path {model_path}: no config.json there")
    raw = json.loads((folder / "config.json").read_text())
    _check_supported(raw, model_path)
    heads = raw["num_attention_heads"]
    biased = bool(raw.get("attention_bias", False))
    architecture = raw["architectures"][0]
    theta, scaling = _rope_settings(raw, model_path)
    return ModelConfig(
        architecture=architecture,
        model_type=raw.get("model_type", ""),
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        ffn_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or biased,
        o_bias=architecture != "Qwen2ForCausalLM" and biased,
        qk_norm=architecture.startswith("Qwen3"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=raw.get("max_position_embeddings", 2048),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        eos_token_ids=_eos_token_ids(raw, folder),
        experts=_expert_config(raw, model_path) if architecture == "Qwen3MoeForCausalLM" else None,
        quantization=scheme_of(raw.get("quantization_config"), f"--model-path {model_path}"),
    )


def _expert_config(raw: dict, model_path: str | Path) -> ExpertConfig:
    count = raw.get("num_experts") or raw.get("num_local_experts") or 0
    per_token, step = raw.get("num_experts_per_tok", 8), raw.get("decoder_sparse_step") or 1
    if not 1 <= per_token <= count:
        raise ValueError(f"--model-path {model_path}: num_experts_per_tok {per_token} of num_experts {count}")
    dense = raw.get("mlp_only_layers") or ()
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(raw["num_hidden_layers"]))
    return ExpertConfig(count, per_token, raw["moe_intermediate_size"], bool(raw.get("norm_topk_prob", False)), layers)


def _check_supported(raw: dict, model_path: str | Path) -> None:
    architectures = raw.get("architectures") or []
    if not architectures or architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"--model-path {model_path}: architectures {architectures} not supported by the embedded engine; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"--model-path {model_path}: hidden_act {raw['hidden_act']!r} not supported (silu is)")
    if raw.get("mlp_bias"):
        raise ValueError(f"--model-path {model_path}: mlp_bias not supported")
    if raw.get("use_sliding_window"):
        raise ValueError(f"--model-path {model_path}: use_sliding_window not supported")


def _rope_settings(raw: dict, model_path: str | Path) -> tuple[float, dict]:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"--model-path {model_path}: rope type {kind!r} not supported (default, linear, llama3 are)")
    return float(theta), {**parameters, "rope_type": kind}


def _llama3_frequency(frequency: float, scaling: dict) -> float:
    # Long wavelengths are divided by the factor, short ones kept, those between interpolated.
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _eos_token_ids(raw: dict, folder: Path) -> tuple[int, ...]:
    ids: set[int] = set()
    sources = [raw]
    if (folder / "generation_config.json").is_file():
        sources.append(json.loads((folder / "generation_config.json").read_text()))
    for source in sources:
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
