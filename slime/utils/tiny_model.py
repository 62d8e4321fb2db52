"""Write tiny random Hugging Face checkpoints with a byte-level tokenizer, for quickstart and tests.

The folder loads with transformers, with the embedded engine and with the trainer. Same arguments give the same bytes.
Knows nothing about training or serving; needs torch, tokenizers and safetensors only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from slime.utils.weight_file import write_safetensors

SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Added after the 256 byte tokens, so their ids are 256, 257, 258, 259."""

BYTE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CLASS_NAMES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}


@dataclass(frozen=True)
class Experts:
    """Sizes of the mixture-of-experts layers: how many experts, how many of them a token visits, how wide each is.

    `dense_layers` have an ordinary MLP instead.
    """

    count: int = 4
    per_token: int = 2
    width: int = 32
    dense_layers: tuple[int, ...] = ()


def make_tiny_model(
    out_dir: str | Path,
    arch: str = "qwen3",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = BYTE_VOCAB_SIZE,
    tied: bool = True,
    seed: int = 0,
    max_positions: int = 2048,
    init_std: float = 0.02,
    experts: Experts | None = None,
) -> Path:
    """Write config.json, generation_config.json, model.safetensors (fp32) and the tokenizer files into `out_dir`.

    Args:
        arch: qwen3 (q/k norm), qwen3_moe (the same with experts), qwen2 (qkv bias) or llama.
        head_dim: size of one attention head; hidden // heads when None.
        vocab: rows of the embedding, at least the 260 tokens of the byte tokenizer.
        init_std: standard deviation of all matrices; norms start at 1, biases are random too.
        experts: sizes of a qwen3_moe model's experts; four experts, two a token, when None.

    Returns: `out_dir` as a Path.
    Raises: ValueError for an unknown arch or sizes that do not fit each other.
    """
    if arch not in _CLASS_NAMES:
        raise ValueError(f"arch={arch!r}: expected one of {sorted(_CLASS_NAMES)}")
    if vocab < BYTE_VOCAB_SIZE:
        raise ValueError(f"vocab={vocab}: the byte tokenizer alone has {BYTE_VOCAB_SIZE} tokens")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    config = _model_config(
        arch=arch,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=max_positions,
        initializer_range=init_std,
        **(_expert_sizes(experts or Experts()) if arch == "qwen3_moe" else {}),
    )
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json",
        {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"], "do_sample": True},
    )
    _write_weights(out / "model.safetensors", config, seed)
    write_byte_tokenizer(out, model_max_length=max_positions)
    return out


def write_byte_tokenizer(out_dir: str | Path, model_max_length: int = 2048) -> None:
    """Write tokenizer.json and tokenizer_config.json of the byte tokenizer: 256 bytes, no merges, four special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    out = Path(out_dir)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<|pad|>",
            "eos_token": "<|im_end|>",
            "padding_side": "left",
            "model_max_length": model_max_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _model_config(arch: str, **sizes) -> dict:
    pad, _, _, im_end = range(256, BYTE_VOCAB_SIZE)
    config = {
        "architectures": [_CLASS_NAMES[arch]],
        "model_type": arch,
        **sizes,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_dropout": 0.0,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": im_end,
        "pad_token_id": pad,
        "dtype": "float32",
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if arch == "llama":
        config["mlp_bias"] = False
    if arch == "qwen2":
        del config["attention_bias"]
    return config


def _expert_sizes(experts: Experts) -> dict:
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def _weight_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        has_experts = config["model_type"] == "qwen3_moe" and layer not in config["mlp_only_layers"]
        if has_experts:
            shapes[prefix + "mlp.gate.weight"] = (config["num_experts"], hidden)
        numbers = [f"experts.{i}." for i in range(config["num_experts"])] if has_experts else [""]
        width = config["moe_intermediate_size"] if has_experts else ffn
        for number in numbers:
            shapes[f"{prefix}mlp.{number}gate_proj.weight"] = (width, hidden)
            shapes[f"{prefix}mlp.{number}up_proj.weight"] = (width, hidden)
            shapes[f"{prefix}mlp.{number}down_proj.weight"] = (hidden, width)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _write_weights(path: Path, config: dict, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _weight_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * config["initializer_range"]
    write_safetensors(tensors, path)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
