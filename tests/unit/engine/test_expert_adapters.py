"""Adapters on experts: each request gets what the model with its adapter merged gives, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from slime.utils import peft_format
from slime.utils.tiny_model import Experts, make_tiny_model
from tests.unit.engine.test_routed_experts import PROMPT, Server

RANK, ALPHA, TARGETS = 4, 8.0, ("up_proj", "down_proj", "q_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    experts = Experts(count=6, per_token=2, dense_layers=(1,))
    return make_tiny_model(tmp_path_factory.mktemp("model"), arch="qwen3_moe", init_std=0.2, layers=2, experts=experts)


@pytest.fixture
def server(folder):
    server = Server(folder)
    yield server
    server.engine.scheduler.stop()


def parts_of(server: Server):
    generator = server.engine.scheduler.generator
    return generator.model.weights, generator.adapters


def random_factors(weights, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A [r, in] and B [out, r] of every targeted module."""
    generator, factors = torch.Generator().manual_seed(seed), {}
    for name, at in weights.layout.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            shapes = (RANK, at.shape[1]), (at.shape[0], RANK)
            factors[module] = tuple(torch.randn(shape, generator=generator) * 0.2 for shape in shapes)
    return factors


def load(server: Server, name: str, factors: dict) -> None:
    adapters = parts_of(server)[1]
    tensors = {
        peft_format.tensor_name(module, factor): tensor
        for module, pair in factors.items()
        for factor, tensor in zip("AB", pair, strict=True)
    }
    config = peft_format.adapter_config("model", RANK, ALPHA, 0.0, list(TARGETS))
    adapters.add(adapters.make(name, config, tensors, "tensors"))


def generate(server: Server, names: list) -> list[tuple[list[int], list[float]]]:
    body = {"input_ids": [PROMPT] * len(names), "lora_path": names, "return_logprob": True}
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    answers = server.generate(**body, sampling_params=sampling, return_routed_experts=False)
    return [(ids, [entry[0] for entry in meta["output_token_logprobs"]]) for ids, meta in answers]


def test_each_request_gets_what_its_merged_model_gives(server, folder):
    factors = {name: random_factors(parts_of(server)[0], seed) for seed, name in enumerate("ab")}
    assert any(".experts.5." in module for module in factors["a"])
    for name, own in factors.items():
        load(server, name, own)
    names = ["a", None, "b", "a"]
    found = generate(server, names)
    assert len({tuple(ids) for ids, _ in found}) == 3
    for name in ("a", None, "b"):
        merged = Server(folder)
        try:
            weights = parts_of(merged)[0]
            for module, (a, b) in factors.get(name, {}).items():
                weights.view(f"{module}.weight").add_(ALPHA / RANK * b @ a)
            ((ids, logprobs),) = generate(merged, [None])
        finally:
            merged.engine.scheduler.stop()
        for own, (got, got_logprobs) in zip(names, found, strict=True):
            if own == name:
                assert got == ids and got_logprobs == pytest.approx(logprobs, abs=1e-4)


def test_factors_of_another_shape_are_refused(server):
    factors = random_factors(parts_of(server)[0], 0)
    module = next(name for name in factors if ".experts.2." in name)
    factors[module] = (factors[module][0], factors[module][1][:-1])
    with pytest.raises(ValueError, match=r"factors of .*experts\.2\."):
        load(server, "a", factors)
