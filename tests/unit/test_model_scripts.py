"""Every script of scripts/models defines MODEL_ARGS alone, with known flags that give the model's parameter count."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from slime.config.registry import all_flags

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.sh"))

#: billions of parameters, multi-token prediction and sparse-attention indexer not counted
TOTALS = {
    "qwen2.5-0.5B": 0.49,
    "qwen2.5-1.5B": 1.54,
    "qwen2.5-3B": 3.09,
    "qwen2.5-7B": 7.62,
    "qwen2.5-14B": 14.77,
    "qwen2.5-32B": 32.76,
    "qwen2.5-72B": 72.7,
    "qwen3-0.6B": 0.60,
    "qwen3-1.7B": 1.72,
    "qwen3-4B": 4.02,
    "qwen3-4B-Instruct-2507": 4.02,
    "qwen3-8B": 8.19,
    "qwen3-14B": 14.77,
    "qwen3-32B": 32.76,
    "llama3-8B": 8.03,
    "llama3-70B": 70.55,
    "llama3.1-8B": 8.03,
    "llama3.1-8B-Instruct": 8.03,
    "llama3.1-70B": 70.55,
    "llama3.3-70B": 70.55,
    "llama3.2-3B-Instruct": 3.21,
    "llama3.2-3B-Instruct-amd": 3.21,
    "llama3.2-1B": 1.24,
    "glm4-9B": 9.40,
    "glm4-32B": 32.56,
    "mimo-7B-rl": 7.62,
    "qwen3-30B-A3B": 30.5,
    "qwen3-235B-A22B": 235.1,
    "glm4.5-106B-A12B": 106.9,
    "glm4.5-355B-A32B": 352.8,
    "glm4.6-355B-A32B": 352.8,
    "glm4.7-355B-A32B": 352.8,
    "minimax-m2": 228.7,
    "deepseek-v3": 671.0,
    "deepseek-v3.1": 671.0,
    "deepseek-r1": 671.0,
    "kimi-k2": 1026.4,
    "kimi-k2-thinking": 1026.4,
    "moonlight": 16.0,
    "glm4.7-30B-A3B": 29.9,
    "glm5-744B-A40B": 743.2,
    "glm5.1-744B-A40B": 743.2,
    "glm5.2-744B-A40B": 743.2,
}
#: names that say the size themselves, to the digits of the name
NAMED_SIZES = {
    "qwen3-next-80B-A3B": (80, 0.01),
    "qwen3.5-0.8B": (0.8, 0.1),
    "qwen3.5-4B": (4.2, 0.05),
    "qwen3.5-9B": (9, 0.05),
    "qwen3.5-27B": (27, 0.02),
    "qwen3.6-27B": (27, 0.02),
    "qwen3.5-35B-A3B": (35, 0.02),
    "qwen3.6-35B-A3B": (35, 0.02),
    "qwen3.5-35B-A3B-vl": (35, 0.02),
}
CUT = {"deepseek-v3-5layer", "deepseek-v3-20layer"}


def source_script(name: str, **environment: str) -> list[str]:
    """Source a script as a run script does and return the words of its array, expanded without quotes."""
    command = f'source "{FOLDER / name}.sh"; printf "%s\\n" ${{MODEL_ARGS[@]}}'
    done = subprocess.run(
        ["bash", "-euc", command],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@functools.cache
def shape_of(name: str, **environment: str) -> dict[str, str | bool]:
    """Return flag -> value of a script, True for a switch."""
    words, shape = source_script(name, **environment), {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in shape, f"{word} twice"
            shape[word] = True if following.startswith("--") else following
    return shape


class Shape:
    """Integers by flag, 0 for an absent one."""

    def __init__(self, flags: dict):
        self.flags = flags

    def __getitem__(self, flag: str) -> int:
        value = self.flags.get("--" + flag, 0)
        return value if isinstance(value, bool) else int(value)


def num_parameters(flags: dict) -> int:
    s = Shape(flags)
    layers, hidden, vocab = s["num-layers"], s["hidden-size"], s["vocab-size"]
    embeddings = vocab * hidden * (2 if s["untie-embeddings-and-output-weights"] else 1)
    norms = (2 + 2 * s["post-mlp-layernorm"]) * hidden * layers + hidden
    is_moe = eval(flags["--moe-layer-freq"], {"__builtins__": {}}) if s["num-experts"] else [0] * layers
    assert len(is_moe) == layers
    feed_forward = sum(experts(s) if moe else 3 * hidden * s["ffn-hidden-size"] for moe in is_moe)
    interval = s["linear-attention-freq"]
    num_linear = layers - layers // interval if interval else 0
    mixers = num_linear * delta_net(s) + (layers - num_linear) * attention(s)
    return embeddings + norms + feed_forward + mixers


def experts(s: Shape) -> int:
    hidden = s["hidden-size"]
    width = s["num-experts"] * s["moe-ffn-hidden-size"] + s["moe-shared-expert-intermediate-size"]
    gate = hidden if s["moe-shared-expert-gate"] else 0
    bias = s["num-experts"] if s["moe-router-enable-expert-bias"] else 0
    return 3 * hidden * width + hidden * s["num-experts"] + bias + gate


def attention(s: Shape) -> int:
    if s["multi-latent-attention"]:
        return latent_attention(s)
    hidden, heads, width = s["hidden-size"], s["num-attention-heads"], s["kv-channels"]
    kv = s["num-query-groups"] or heads
    query = heads * width * (2 if s["attention-output-gate"] else 1)
    bias = query + 2 * kv * width if s["add-qkv-bias"] else 0
    norms = 2 * width if s["qk-layernorm"] else 0
    return hidden * (query + 2 * kv * width + heads * width) + bias + norms


def latent_attention(s: Shape) -> int:
    hidden, heads, kv_rank = s["hidden-size"], s["num-attention-heads"], s["kv-lora-rank"]
    nope, rope, value, q_rank = s["qk-head-dim"], s["qk-pos-emb-head-dim"], s["v-head-dim"], s["q-lora-rank"]
    query = heads * (nope + rope)
    queries = hidden * q_rank + q_rank + q_rank * query if q_rank else hidden * query
    keys_values = hidden * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value)
    return queries + keys_values + heads * value * hidden


def delta_net(s: Shape) -> int:
    hidden, value_heads = s["hidden-size"], s["linear-num-value-heads"]
    keys = s["linear-num-key-heads"] * s["linear-key-head-dim"]
    values = value_heads * s["linear-value-head-dim"]
    mixed = 2 * keys + values
    projections = hidden * (mixed + values + 2 * value_heads) + values * hidden
    return projections + s["linear-conv-kernel-dim"] * mixed + 2 * value_heads + s["linear-value-head-dim"]


@functools.cache
def known_flags() -> set[str]:
    return {name for flag in all_flags() for name in (flag.name, *flag.aliases)}


def test_every_script_is_checked():
    assert set(NAMES) == set(TOTALS) | set(NAMED_SIZES) | CUT


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_parameter_count_is_the_model_s(name):
    assert num_parameters(shape_of(name)) / 1e9 == pytest.approx(TOTALS[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(NAMED_SIZES))
def test_parameter_count_fits_the_name(name):
    size, tolerance = NAMED_SIZES[name]
    assert num_parameters(shape_of(name)) / 1e9 == pytest.approx(size, rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_flags_are_known_and_norms_rope_and_mlp_are_stated(name):
    shape = shape_of(name)
    assert set(shape) <= known_flags()
    assert {"--normalization", "--norm-epsilon", "--rotary-base", "--swiglu", "--disable-bias-linear"} <= set(shape)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_leaves_only_its_array_behind(name):
    command = f'before="$(compgen -v)"; source "{FOLDER / name}.sh"; comm -13 <(sort <<<"$before") <(compgen -v | sort)'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (set(done.stdout.split()) - {"before", "_", "PIPESTATUS"}, done.stderr) == ({"MODEL_ARGS"}, "")


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_rotary_base_can_be_overridden(name):
    shape = shape_of(name, MODEL_ARGS_NUM_LAYERS="4", MODEL_ARGS_ROTARY_BASE="77")
    assert (shape["--num-layers"], shape["--rotary-base"]) == ("4", "77")
    if "--moe-layer-freq" in shape:
        assert len(eval(shape["--moe-layer-freq"], {"__builtins__": {}})) == 4


def test_derived_scripts_differ_from_their_base_where_the_models_do():
    assert shape_of("qwen3-4B-Instruct-2507")["--rotary-base"] == "5000000"
    assert shape_of("glm5.2-744B-A40B")["--rotary-base"] == "8000000"
    assert shape_of("deepseek-v3-5layer")["--num-layers"] == "5"
    thinking = shape_of("kimi-k2-thinking")
    assert (thinking["--rotary-scaling-factor"], thinking["--norm-epsilon"], thinking["--beta-fast"]) == (
        "64",
        "1e-5",
        "1",
    )


def test_a_relative_path_in_the_script_s_own_folder_works():
    done = subprocess.run(
        ["bash", "-euc", "source deepseek-r1.sh; echo ${#MODEL_ARGS[@]}"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert int(done.stdout) > 20, done.stderr
