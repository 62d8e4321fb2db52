"""The check after a weight update: what each kind of engine reports is computed from what the trainer exports."""

from __future__ import annotations

import hashlib
import logging

import pytest
import torch

from slime.backends.weight_sync.check import check_engines
from slime.utils.checksum import tensor_checksum
from slime.utils.sglang_checksum import sglang_checksums

PREFIX = "model.layers.0.self_attn."


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {PREFIX + f"{x}_proj.weight": (4, 3) for x in "qkv"} | {"model.embed_tokens.weight": (65, 3)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


class Client:
    base_url = "http://engine"

    def __init__(self, reply: dict, **info):
        self._reply, self._info = reply, {"device": "cpu", **info}

    def weights_checker(self, action: str) -> dict:
        assert action == "checksum"
        return self._reply

    def server_info(self) -> dict:
        return self._info


def sglang_reply(named_tensors) -> dict:
    return {"success": True, "ranks": [{"checksums": sglang_checksums(named_tensors)}]}


def test_sglang_checksum_is_that_of_the_fused_and_padded_tensor():
    named = dict(weights())
    qkv = torch.cat([named[PREFIX + f"{x}_proj.weight"] for x in "qkv"])
    embedding = torch.cat([named["model.embed_tokens.weight"], torch.zeros(63, 3)])
    expected = {PREFIX + "qkv_proj.weight": qkv, "model.embed_tokens.weight": embedding}
    digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in expected.items()}
    assert sglang_checksums(weights()) == digests
    assert sglang_checksums(reversed(weights())) == digests


def test_equal_engines_pass():
    ours = Client({"checksums": {name: tensor_checksum(tensor) for name, tensor in weights()}})
    check_engines([ours, Client(sglang_reply(weights()))], weights(), 3)


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_weight_that_did_not_arrive_is_named(kind):
    changed = [(name, tensor + (name.endswith("k_proj.weight"))) for name, tensor in weights()]
    if kind == "sglang":
        client, named = Client(sglang_reply(changed)), "qkv_proj"
    else:
        client, named = Client({"checksums": {name: tensor_checksum(tensor) for name, tensor in changed}}), "k_proj"
    with pytest.raises(RuntimeError, match=f"version 3 engine http://engine differs .* in 1 of .*{named}"):
        check_engines([client], weights(), 3)


def test_sglang_on_a_gpu_is_compared_by_version_and_that_is_said(caplog):
    client = Client({"success": True, "ranks": [{"checksums": {"a": "1"}}]}, device="cuda")
    with caplog.at_level(logging.WARNING):
        check_engines([client], weights(), 3)
    assert "only the weight version is compared" in caplog.text
