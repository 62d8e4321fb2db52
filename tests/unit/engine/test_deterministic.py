"""`--enable-deterministic-inference`: the same bits for a request whatever else is in the batch."""

from __future__ import annotations

import random

import pytest
import torch

from slime.engine.admission import prefill_groups
from slime.engine.generator import Generator
from slime.engine.kv_cache import KVCache
from slime.engine.model import Model
from slime.engine.model_config import load_model_config
from slime.engine.requests import Request
from slime.engine.sampling_params import SamplingParams
from slime.engine.tokenizer import EngineTokenizer
from slime.engine.weights import Weights
from slime.utils.tiny_model import make_tiny_model

NUM_TOKENS, MAX_ROWS = 24, 32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def make_generator(tmp_path_factory):
    folder = make_tiny_model(
        tmp_path_factory.mktemp("model"), hidden=96, layers=3, heads=6, kv_heads=2, head_dim=16, ffn=200, init_std=0.2
    )
    config = load_model_config(folder)
    weights = Weights(config, torch.float32, CPU)
    weights.load(folder)

    def make(one_by_one: bool) -> Generator:
        cache = KVCache(config, torch.float32, CPU, 1 << 26, MAX_ROWS)
        model = Model(config, weights, cache, 256)
        return Generator(model, cache, EngineTokenizer(folder), MAX_ROWS, one_by_one)

    return make


def request(seed: int) -> Request:
    prompt = [random.Random(seed).randrange(250) for _ in range(3 + seed % 29)]
    return Request(str(seed), prompt, SamplingParams(max_new_tokens=NUM_TOKENS), seed=seed, stop_ids=())


@torch.inference_mode()
def outcome(generator: Generator, groups: list[list[int]]) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probs per seed; groups start one after the other, two decode steps apart."""
    waiting, results = [list(group) for group in groups], {}
    while waiting or generator.batch.size:
        reasons = {}
        if waiting:
            starting = [request(seed) for seed in waiting.pop(0)]
            generator.cache.reserve(generator.batch.size + len(starting), 64, generator.batch.size)
            for families in prefill_groups(starting):
                reasons.update(generator.prefill(families))
        for _ in range(2):
            if not reasons:
                reasons = generator.decode()
        for row in reasons:
            done = generator.batch.flush_row(row)
            results[done.seed] = (done.output_ids, done.output_logprobs)
        generator.remove(sorted(reasons))
    return results


COMPANIONS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


def test_a_request_gives_the_same_bits_alone_and_among_others(make_generator):
    together = outcome(make_generator(True), COMPANIONS)
    for seed in (1, 4, 7, 11, 13):
        alone = outcome(make_generator(True), [[seed]])
        assert alone[seed] == together[seed]
    assert outcome(make_generator(True), [[13, 7, 1], [11, 4, 5]])[11] == together[11]


def test_deterministic_inference_changes_only_rounding(make_generator):
    together, plain = outcome(make_generator(True), COMPANIONS), outcome(make_generator(False), COMPANIONS)
    for seed, (tokens, log_probs) in together.items():
        assert plain[seed][0] == tokens
        assert plain[seed][1] == pytest.approx(log_probs, abs=1e-4)
    assert any(plain[seed][1] != log_probs for seed, (_, log_probs) in together.items())
