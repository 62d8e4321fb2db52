"""Released memory is free: measured on an engine of its own by proportional set size."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from slime.utils import tensor_wire
from slime.utils.platform import process_tree_memory_bytes
from slime.utils.tiny_model import make_tiny_model
from tests.engine.engine_process import Api, serving

PROMPT = list(range(10, 110))
MIB = 2**20


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """About 20 million parameters, 80 MB."""
    shape = {"hidden": 512, "layers": 6, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1536}
    return make_tiny_model(tmp_path_factory.mktemp("large"), init_std=0.05, **shape)


@pytest.fixture(scope="module")
def large_engine(large_model):
    with serving(large_model) as (url, process):
        api = Api(url)
        yield api, process.pid
        api.close()


def weight_bytes(folder) -> int:
    return sum(tensor.numel() * 4 for tensor in load_file(str(folder / "model.safetensors")).values())


def cache_bytes(api) -> int:
    lines = [line for line in api.get("/metrics").text.splitlines() if "kv_cache_bytes" in line and line[0] != "#"]
    return int(float(lines[0].split()[-1]))


def test_release_frees_weights_and_cache_and_resume_brings_the_same_outputs_back(large_engine, large_model):
    api, pid = large_engine
    prompts = [[i, *PROMPT] for i in range(32)]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    before = [answer["output_ids"] for answer in _batch(api, prompts, sampling)]
    weights, cache = weight_bytes(large_model), cache_bytes(api)
    assert weights > 70 * MIB and cache > 50 * MIB
    full = process_tree_memory_bytes(pid)
    api.client.release_memory_occupation()
    low = process_tree_memory_bytes(pid)
    assert full - low > 0.9 * (weights + cache), (full / MIB, low / MIB, weights / MIB, cache / MIB)
    api.client.release_memory_occupation()  # twice is harmless
    api.client.resume_memory_occupation(["weights"])
    back = process_tree_memory_bytes(pid)
    assert abs(back - low - weights) < 0.1 * weights, (back / MIB, low / MIB, weights / MIB)
    assert api.post("/generate", {"input_ids": PROMPT}).status_code == 400  # the cache is still released
    api.client.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert [answer["output_ids"] for answer in _batch(api, prompts, sampling)] == before


def test_released_weights_refuse_updates_and_the_checker_until_resumed(large_engine, large_model):
    api, _ = large_engine
    checksums = api.client.weights_checker("checksum")["checksums"]
    pairs = list(load_file(str(large_model / "model.safetensors")).items())[:2]
    api.client.release_memory_occupation(["weights"])
    api.client.begin_weight_update()
    text = tensor_wire.serialize(tensor_wire.flatten(pairs))
    for path, body in (
        ("/update_weights_from_tensor", {"serialized_named_tensors": [text], "load_format": "flattened_bucket"}),
        ("/update_weights_from_disk", {"model_path": str(large_model)}),
        ("/weights_checker", {"action": "checksum"}),
        ("/weights_checker", {"action": "snapshot"}),
        ("/get_weights_by_name", {"name": "model.norm.weight"}),
    ):
        response = api.post(path, body)
        assert response.status_code == 400 and "released" in response.json()["message"], (path, response.text)
    api.client.resume_memory_occupation()
    api.client.end_weight_update()
    assert api.client.weights_checker("checksum")["checksums"] == checksums


def _batch(api, prompts, sampling) -> list[dict]:
    response = api.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    return response.json()
