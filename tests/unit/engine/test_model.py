"""The forward pass against transformers, and loading of what transformers writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from slime.engine.kv_cache import KVCache
from slime.engine.model import Model
from slime.engine.model_config import load_model_config
from slime.engine.weights import Weights
from slime.utils.tiny_model import Experts, make_tiny_model

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [100, 3, 5, 99, 31, 4, 200, 17, 6], [42, 1, 2]]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def edit_config(folder, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def load_engine_model(folder, dtype=torch.float32) -> Model:
    config = load_model_config(folder)
    weights = Weights(config, dtype, CPU)
    weights.load(folder)
    return Model(config, weights, KVCache(config, dtype, CPU, 1 << 26, 8), 512)


@torch.inference_mode()
def greedy_with_logits(
    model: Model, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Full sequences after `count` greedy steps, and the logits [B, V] of each step."""
    sequences = [list(prompt) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    model.cache.reserve(len(prompts), int(lengths.max()) + count, 0)
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    hidden = model.prefill(padded, 0)[torch.arange(len(prompts)), lengths - 1]
    steps = []
    for _ in range(count):
        logits = model.logits(hidden)
        steps.append(logits)
        chosen = logits.argmax(-1)
        for sequence, token in zip(sequences, chosen.tolist(), strict=True):
            sequence.append(token)
        hidden = model.decode(chosen, lengths.clone(), int(lengths.max()) + 1)
        lengths += 1
    return sequences, steps


@pytest.mark.parametrize(
    ("arch", "options", "config"),
    [
        ("qwen3", {}, {}),
        ("qwen3", {"head_dim": 32, "heads": 4, "kv_heads": 1}, {"rope_theta": 1e6, "rope_parameters": None}),
        ("qwen2", {"kv_heads": 4}, {}),
        ("llama", {"tied": False}, {}),
        ("llama", {}, {"rope_parameters": LLAMA3_ROPE}),
        ("qwen3_moe", {"experts": Experts(count=6, per_token=3)}, {}),
        ("qwen3_moe", {"tied": False, "experts": Experts(dense_layers=(0,))}, {"norm_topk_prob": False}),
    ],
)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path, arch, options, config):
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, arch=arch, init_std=0.2, **options)
    edit_config(folder, **config)
    reference = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    sequences, steps = greedy_with_logits(load_engine_model(folder), PROMPTS, 12)
    for row, (prompt, sequence) in enumerate(zip(PROMPTS, sequences, strict=True)):
        expected = reference(torch.tensor([sequence])).logits[0, len(prompt) - 1 : -1]
        assert sequence[len(prompt) :] == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack([step[row] for step in steps]), expected, atol=1e-4, rtol=1e-4)


def test_rows_do_not_see_each_other(tmp_path):
    model = load_engine_model(make_tiny_model(tmp_path, init_std=0.2))
    together, _ = greedy_with_logits(model, PROMPTS, 6)
    model.cache.drop()
    assert [greedy_with_logits(model, [prompt], 6)[0][0] for prompt in PROMPTS] == together


def test_bfloat16_stays_close_to_float32(tmp_path):
    folder = make_tiny_model(tmp_path, init_std=0.1)
    _, exact = greedy_with_logits(load_engine_model(folder), PROMPTS, 1)
    _, rounded = greedy_with_logits(load_engine_model(folder, torch.bfloat16), PROMPTS, 1)
    assert rounded[0].dtype == torch.float32
    torch.testing.assert_close(rounded[0].log_softmax(-1), exact[0].log_softmax(-1), atol=0.1, rtol=0.05)


def test_copied_and_moved_cache_rows_continue_alike(tmp_path):
    model = load_engine_model(make_tiny_model(tmp_path, init_std=0.2))
    with torch.inference_mode():
        model.cache.reserve(4, 20, 0)
        model.prefill(torch.tensor([PROMPTS[0], [1] * 5]), 0)
        model.cache.copy_rows(np.array([0]), 2, 5)
        model.cache.move_rows([2], [1], 5)
        hidden = model.decode(torch.tensor([7, 7, 7]), torch.tensor([5, 5, 5]), 6)
    torch.testing.assert_close(hidden[1], hidden[0])


def test_cache_keeps_live_rows_when_it_grows(tmp_path):
    model = load_engine_model(make_tiny_model(tmp_path, init_std=0.2))
    with torch.inference_mode():
        model.cache.reserve(1, 8, 0)
        model.prefill(torch.tensor([PROMPTS[0]]), 0)
        before = model.cache.keys[1][0, :, :5].clone()
        model.cache.reserve(8, 300, 1)
    assert model.cache.length >= 300
    assert torch.equal(model.cache.keys[1][0, :, :5], before)


def test_cache_bounds_rows_by_bytes_and_always_lets_one_in(tmp_path):
    config = load_model_config(make_tiny_model(tmp_path))
    cache = KVCache(config, torch.float32, CPU, budget_bytes=64 * 2 * 2 * 2 * 16 * 4 * 3, max_rows=100)
    assert cache.rows_that_fit(64) == 3
    assert cache.rows_that_fit(10_000) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM",
        ),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method .gptq."),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(tmp_path, change, message):
    folder = make_tiny_model(tmp_path)
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)
