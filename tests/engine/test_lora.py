"""Adapters by name beside the base model: PEFT's numbers, several in one batch, loading and unloading while requests run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from slime.utils import peft_format, tensor_wire
from slime.utils.checksum import tensor_checksum
from slime.utils.engine_client import EngineError

pytestmark = pytest.mark.embedded_only
PROMPT = [(7 * i) % 250 for i in range(24)]  # long enough to be kept for later requests
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
RANK = 4


def make_adapter(folder: Path, model_dir: Path, seed: int) -> Path:
    """A PEFT folder with random factors."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {"q_proj": (q, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    shapes |= {"gate_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config.num_hidden_layers):
        for name, (out, width) in shapes.items():
            module = f"model.layers.{layer}.{'mlp' if name in ('gate_proj', 'down_proj') else 'self_attn'}.{name}"
            for factor, shape in (("A", (RANK, width)), ("B", (out, RANK))):
                tensors[peft_format.tensor_name(module, factor)] = torch.randn(shape, generator=generator) * 0.2
    peft_format.write_adapter(folder, peft_format.adapter_config(str(model_dir), RANK, 8.0, 0.0, TARGETS), tensors)
    return folder


@pytest.fixture(scope="module")
def folders(model_dir, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(root / name, model_dir, seed) for seed, name in enumerate(("a", "b", "c"))}


@pytest.fixture
def loaded(api, folders):
    """Adapters a and b are loaded, and nothing is afterwards."""
    for name in ("a", "b"):
        api.client.load_lora_adapter(name, str(folders[name]))
    yield
    api.client.continue_generation()
    for name in [card["id"] for card in api.get("/v1/models").json()["data"] if card["parent"]]:
        api.client.unload_lora_adapter(name)


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


@torch.no_grad()
def reference_logprobs(model_dir, folder: Path | None, output: list[int]) -> list[float]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32)
    model = model if folder is None else PeftModel.from_pretrained(model, str(folder))
    table = model(torch.tensor([PROMPT + output])).logits[0].log_softmax(-1)
    return [table[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(output)]


def test_each_request_of_a_batch_goes_through_its_own_adapter_as_in_peft(api, loaded, model_dir, folders):
    names = ["a", None, "b", "a"]
    together = api.greedy([PROMPT] * 4, lora_path=names)
    alone = [api.greedy(PROMPT, lora_path=name) for name in names]
    for name, answer, single in zip(names, together, alone, strict=True):
        assert answer["output_ids"] == single["output_ids"]
        expected = reference_logprobs(model_dir, folders.get(name), answer["output_ids"])
        assert logprobs(answer) == pytest.approx(expected, abs=1e-4)
        assert logprobs(single) == pytest.approx(expected, abs=1e-4)
    assert len({tuple(answer["output_ids"]) for answer in together}) == 3


def test_one_name_holds_for_a_whole_batch(api, loaded):
    both = api.greedy([PROMPT, PROMPT[:10]], lora_path="b")
    assert both[0]["output_ids"] == api.greedy(PROMPT, lora_path="b")["output_ids"]
    assert both[1]["output_ids"] == api.greedy(PROMPT[:10], lora_path="b")["output_ids"]


def test_what_one_adapter_read_is_not_used_for_another(api, loaded):
    api.client.flush_cache(10)
    first = {name: api.greedy(PROMPT, lora_path=name) for name in ("a", "b", None)}
    assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in first.values())
    again = {name: api.greedy(PROMPT, lora_path=name) for name in ("a", "b", None)}
    for name, answer in again.items():
        assert answer["meta_info"]["cached_tokens"] == len(PROMPT) - 1
        assert answer["output_ids"] == first[name]["output_ids"]


def test_tensors_give_what_the_folder_gives(api, loaded, folders):
    config, tensors = peft_format.read_adapter(folders["b"])
    text = tensor_wire.serialize(tensor_wire.flatten(list(tensors.items())))
    api.client.load_lora_adapter_from_tensors("t", config, [text], load_format=tensor_wire.FLATTENED_BUCKET)
    api.client.flush_cache(10)
    assert logprobs(api.greedy(PROMPT, lora_path="t")) == pytest.approx(
        logprobs(api.greedy(PROMPT, lora_path="b")), abs=1e-5
    )
    held = api.client.weights_checker("checksum")["adapters"]
    assert held["t"] == held["b"] == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def test_openai_routes_take_the_adapter_behind_a_colon_or_as_lora_path(api, loaded):
    cards = api.get("/v1/models").json()["data"]
    base = cards[0]["id"]
    assert [(card["id"], card["parent"]) for card in cards[1:]] == [("a", base), ("b", base)]
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}

    def answer(**changes) -> list[float]:
        reply = api.post("/v1/completions", {**body, "model": base, **changes})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["logprobs"]["token_logprobs"]

    expected = pytest.approx(logprobs(api.greedy(PROMPT, 6, lora_path="a")), abs=1e-5)
    for chosen in ({"model": f"{base}:a"}, {"lora_path": "a"}, {"model": f"{base}:a", "lora_path": "b"}):
        assert answer(**chosen) == expected
    assert answer() == pytest.approx(logprobs(api.greedy(PROMPT, 6)), abs=1e-5) and answer() != expected


def test_names_that_are_not_loaded_or_loaded_already_are_refused(api, loaded, folders):
    response = api.post("/generate", {"input_ids": PROMPT, "lora_path": "nobody"})
    assert response.status_code == 400 and "adapters are not loaded: nobody" in response.text
    with pytest.raises(EngineError, match="adapter a because it is already loaded"):
        api.client.load_lora_adapter("a", str(folders["c"]))
    with pytest.raises(EngineError, match="LoRA with name nobody does not exist"):
        api.client.unload_lora_adapter("nobody")
    with pytest.raises(EngineError, match="not a PEFT adapter folder"):
        api.client.load_lora_adapter("x", "/nowhere")


def test_adapters_of_another_shape_or_kind_are_refused(api, loaded, folders):
    config, tensors = peft_format.read_adapter(folders["c"])

    def load(config, tensors):
        text = tensor_wire.serialize(list(tensors.items()))
        api.client.load_lora_adapter_from_tensors("x", config, [text])

    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    for changed, changed_config, message in (
        ({**tensors, name: torch.zeros(RANK, 3)}, config, "have shapes"),
        ({key: value for key, value in tensors.items() if key != name}, config, "has only its B factor"),
        (tensors, {**config, "use_dora": True}, "use_dora True is not supported"),
        (
            {peft_format.tensor_name("model.layers.9.mlp.up_proj", f): torch.zeros(4, 4) for f in "AB"},
            config,
            "no linear",
        ),
    ):
        with pytest.raises(EngineError, match=message):
            load(changed_config, changed)
    assert api.greedy(PROMPT, lora_path="a")["output_ids"]


def in_background(call) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_unloading_waits_for_the_adapters_requests_and_takes_no_new_ones(api, loaded):
    expected = api.greedy(PROMPT, 8, lora_path="a")["output_ids"]
    running, answers = in_background(lambda: api.greedy(PROMPT, 4000, lora_path="a", rid="long"))
    api.wait_for_running(1)
    unloading, _ = in_background(lambda: api.client.unload_lora_adapter("a"))
    deadline, one_token = time.monotonic() + 60, {"max_new_tokens": 1}
    while (
        "not loaded"
        not in api.post("/generate", {"input_ids": PROMPT, "lora_path": "a", "sampling_params": one_token}).text
    ):
        assert time.monotonic() < deadline
    api.wait_for_running(1, 0)
    assert unloading.is_alive() and running.is_alive()
    api.client.abort("long")
    running.join(60)
    unloading.join(60)
    output = answers[0]["output_ids"]
    assert not unloading.is_alive() and output and output[:8] == expected[: len(output)]


def test_requests_put_back_by_a_pause_go_on_with_the_adapter_loaded_meanwhile(api, loaded, model_dir, folders):
    running, answers = in_background(lambda: api.greedy(PROMPT, 4000, lora_path="a", rid="long"))
    api.wait_for_running(1)
    api.client.pause("retract")
    api.client.unload_lora_adapter("a")
    late, late_answers = in_background(lambda: api.post("/generate", {"input_ids": PROMPT, "lora_path": "a"}))
    late.join(0.2)  # it comes while the adapter is in replacement, and waits
    assert late.is_alive()
    api.client.load_lora_adapter("a", str(folders["c"]))
    api.client.update_weight_version("next")
    api.client.continue_generation()
    late.join(60)
    assert late_answers[0].status_code == 200
    api.client.abort("long")
    running.join(60)
    (answer,) = answers
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "next"] and spans[0]["end"] > 0
    cut, output = spans[0]["end"], answer["output_ids"]
    before, after = (reference_logprobs(model_dir, folders[name], output) for name in ("a", "c"))
    assert logprobs(answer)[:cut] == pytest.approx(before[:cut], abs=1e-3)
    assert logprobs(answer)[cut:] == pytest.approx(after[cut:], abs=1e-3)
    api.client.update_weight_version("default")
