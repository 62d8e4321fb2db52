"""Weight updates from disk and from a process group, versions, the checker, memory release."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.utils.checksum import tensor_checksum
from slime.utils.engine_client import EngineError
from slime.utils.process_groups import destroy_process_group, init_process_group
from slime.utils.sglang_checksum import sglang_checksums
from tests.engine.engine_process import Api, free_port, serving

PROMPT = [10, 20, 30, 40]
pytestmark = pytest.mark.usefixtures("original_weights")


class Trainer:
    """Rank 0 of an update group, in the test process."""

    def __init__(self, client, name: str = "test-group"):
        self.client, self.name = client, name
        port = free_port()
        joined = threading.Thread(
            target=client.init_weights_update_group, args=("127.0.0.1", port, 1, 2, name, "gloo"), daemon=True
        )
        joined.start()
        self.group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", 2, 0, name, 60)
        joined.join(60)

    def send(
        self, tensors: dict[str, torch.Tensor], announced: dict[str, list[int]] | None = None, version=None
    ) -> None:
        """Broadcast tensors; raises what the announcing call raised."""
        shapes = announced or {name: list(tensor.shape) for name, tensor in tensors.items()}
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(
                self.client.update_weights_from_distributed,
                list(shapes),
                dtypes,
                list(shapes.values()),
                self.name,
                weight_version=version,
            )
            for tensor in tensors.values():
                dist.broadcast(tensor, src=0, group=self.group)
            call.result(60)

    def leave(self) -> None:
        try:
            self.client.destroy_weights_update_group(self.name)
        except EngineError:
            pass  # dropped already after a failed broadcast
        destroy_process_group(self.group)


@pytest.fixture
def trainer(api):
    trainer = Trainer(api.client)
    yield trainer
    trainer.leave()


def checksums_of(folder) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in load_file(str(folder / "model.safetensors")).items()}


@pytest.mark.embedded_only
def test_checksums_are_those_of_the_checkpoint(api, model_dir):
    assert api.client.weights_checker("checksum")["checksums"] == checksums_of(model_dir)


def test_distributed_update_serves_the_new_weights(api, trainer, model_dir, other_model_dir):
    old = api.greedy(PROMPT)
    new_weights = load_file(str(other_model_dir / "model.safetensors"))
    api.client.begin_weight_update()
    trainer.send(new_weights, version="1")
    api.client.end_weight_update()
    api.client.flush_cache(10)
    new = api.greedy(PROMPT)
    assert new["output_ids"] != old["output_ids"]
    assert new["meta_info"]["weight_version"] == api.client.weight_version() == "1"
    held = api.client.weights_checker("checksum")["ranks"][0]["checksums"]
    assert held == sglang_checksums(new_weights.items())
    api.client.update_weights_from_disk(str(other_model_dir), weight_version="2")
    assert api.greedy(PROMPT)["output_ids"] == new["output_ids"]


def test_distributed_update_outside_begin_and_end_is_refused(api, trainer):
    with pytest.raises(EngineError, match="begin_weight_update") as caught:
        api.client.update_weights_from_distributed(["model.norm.weight"], ["float32"], [[64]], trainer.name)
    assert caught.value.status == 400


@pytest.mark.embedded_only
@pytest.mark.parametrize("fault", ["shape", "name"])
def test_update_that_does_not_fit_changes_nothing_and_the_next_one_works(
    api, trainer, model_dir, other_model_dir, fault
):
    weights = load_file(str(other_model_dir / "model.safetensors"))
    tensors = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"], "model.norm.weight": torch.zeros(3)}
    announced = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if fault == "name":
        tensors["model.norm.weight"] = torch.zeros(64)
        announced = {"model.embed_tokens.weight": announced["model.embed_tokens.weight"], "model.nothing": [64]}
    api.client.begin_weight_update()
    with pytest.raises(EngineError, match="shape" if fault == "shape" else "model.nothing"):
        trainer.send(tensors, announced, version="bad")
    assert api.client.weights_checker("checksum")["checksums"] == checksums_of(model_dir)
    assert api.client.weight_version() != "bad"
    trainer.send(weights, version="good")
    api.client.end_weight_update()
    assert api.client.weights_checker("checksum")["checksums"] == checksums_of(other_model_dir)


@pytest.fixture(scope="module")
def impatient(model_dir):
    """An engine that waits for weights no longer than 3 s."""
    with serving(model_dir, "--weight-update-timeout-s", "3") as (url, _):
        api = Api(url)
        yield api
        api.close()


@pytest.mark.embedded_only
def test_broadcast_that_never_comes_times_out_and_a_new_group_works(impatient, model_dir, other_model_dir):
    trainer = Trainer(impatient.client)
    impatient.client.begin_weight_update()
    with pytest.raises(EngineError, match="receiving 1 weights"):
        impatient.client.update_weights_from_distributed(["model.norm.weight"], ["float32"], [[64]], trainer.name)
    assert impatient.client.weights_checker("checksum")["checksums"] == checksums_of(model_dir)
    assert impatient.greedy(PROMPT)["output_ids"]
    trainer.leave()
    second = Trainer(impatient.client, "second-group")
    second.send(load_file(str(other_model_dir / "model.safetensors")), version="2")
    second.leave()
    assert impatient.client.weights_checker("checksum")["checksums"] == checksums_of(other_model_dir)


@pytest.mark.embedded_only
def test_group_that_nobody_joins_is_a_400(impatient):
    with pytest.raises(EngineError, match="not formed within"):
        impatient.client.init_weights_update_group("127.0.0.1", free_port(), 1, 2, "lonely", "gloo")
    assert impatient.greedy(PROMPT)["output_ids"]


@pytest.mark.embedded_only  # a broken file ends SGLang
def test_update_from_a_bad_folder_changes_nothing(api, tmp_path, model_dir):
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    for folder in (tmp_path, tmp_path / "missing"):
        response = api.post("/update_weights_from_disk", {"model_path": str(folder)})
        assert response.status_code == 400
        assert response.json()["success"] is False
    assert api.client.weights_checker("checksum")["checksums"] == checksums_of(model_dir)


@pytest.mark.parametrize("mode", [pytest.param("in_place", marks=pytest.mark.embedded_only), "retract"])
def test_tokens_of_an_interrupted_request_carry_both_versions(api, other_model_dir, mode):
    before = api.client.weight_version()

    def update():
        api.client.update_weights_from_disk(str(other_model_dir), weight_version="11")

    (answer,) = api.interrupted(update, [PROMPT], mode, temperature=1.0)
    meta = answer["meta_info"]
    cut, end = meta["weight_versions"][0]["end"], meta["completion_tokens"]
    assert 0 < cut < end == meta["finish_reason"]["length"]
    assert meta["weight_versions"] == [
        {"version": before, "start": 0, "end": cut},
        {"version": "11", "start": cut, "end": end},
    ]
    assert meta["weight_version"] == "11"
    assert meta["finish_reason"]["type"] == "length"


def test_fb_a23_new_version_alone_aborts_nothing(api):
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(api.generate, [i + 1], sampling) for i in range(4)]
        api.wait_for_running(4)
        api.client.update_weight_version("next")
        api.wait_for_running(4, 0)
        api.client.abort()
        answers = [future.result(60) for future in futures]
    for answer in answers:
        assert [span["version"] for span in answer["meta_info"]["weight_versions"]][-1] == "next"


@pytest.mark.embedded_only  # SGLang cannot compare on a CPU
def test_checker_finds_a_sync_that_leaves_a_weight_out(api, trainer, model_dir):
    weights = load_file(str(model_dir / "model.safetensors"))
    api.client.weights_checker("snapshot")
    api.client.weights_checker("compare")
    api.client.weights_checker("reset_tensors")
    left_out = "model.layers.0.self_attn.k_proj.weight"
    api.client.begin_weight_update()
    trainer.send({name: tensor for name, tensor in weights.items() if name != left_out})
    with pytest.raises(EngineError, match=left_out):
        api.client.weights_checker("compare")
    trainer.send({left_out: weights[left_out]})
    api.client.weights_checker("compare")


@pytest.mark.embedded_only
def test_weights_by_name_returns_values(api, model_dir):
    name = "model.layers.1.self_attn.v_proj.weight"
    values = api.post("/get_weights_by_name", {"name": name, "truncate_size": 2}).json()
    expected = load_file(str(model_dir / "model.safetensors"))[name][:2]
    assert torch.equal(torch.tensor(values), expected)


@pytest.mark.embedded_only
def test_released_engine_refuses_to_generate_until_resumed(api):
    expected = api.greedy(PROMPT)["output_ids"]
    api.client.release_memory_occupation()
    refused = api.post("/generate", {"input_ids": PROMPT})
    assert refused.status_code == 400
    assert "resume_memory_occupation" in refused.json()["error"]["message"]
    api.client.resume_memory_occupation(["weights"])
    assert api.post("/generate", {"input_ids": PROMPT}).status_code == 400
    api.client.resume_memory_occupation(["kv_cache", "cuda_graph"])
    api.client.resume_memory_occupation()
    assert api.greedy(PROMPT)["output_ids"] == expected


@pytest.mark.embedded_only
def test_release_while_requests_run_is_refused(api):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(api.generate, PROMPT, {"max_new_tokens": 4000, "ignore_eos": True})
        api.wait_for_running(1)
        assert api.post("/release_memory_occupation").status_code == 400
        api.client.abort()
        future.result(60)
