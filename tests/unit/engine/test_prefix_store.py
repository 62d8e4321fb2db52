"""Kept prefixes: what is found, what goes first, and that reading on from one changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.engine import prefix_store
from slime.engine.kv_cache import KVCache
from slime.engine.model import Model
from slime.engine.model_config import load_model_config
from slime.engine.prefix_store import MIN_TOKENS, PrefixStore
from slime.engine.weights import Weights
from slime.utils.tiny_model import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.2)
    config = load_model_config(folder)
    weights = Weights(config, torch.float32, CPU)
    weights.load(folder)
    return Model(config, weights, KVCache(config, torch.float32, CPU, 1 << 26, 8), 512)


@pytest.fixture
def store(model) -> PrefixStore:
    model.cache.drop()
    model.cache.reserve(4, 128, 0)
    return PrefixStore(model.cache, lambda: model.weights.num_changes)


def keep(store: PrefixStore, tokens: list[int], **options) -> None:
    store.keep(0, tokens, store._version, **options)


def test_longest_common_beginning_wins_up_to_the_limit(store):
    base = list(range(40))
    keep(store, base)
    keep(store, [*base[:30], 99, 98])
    assert store.find([*base, 1, 2], 41).length == 40
    assert store.find([*base[:30], 99, 7], 31).length == 31
    assert store.find(base, 20).length == 20
    assert store.find([7, *base], 40) is None
    assert store.find(base, MIN_TOKENS - 1) is None


def test_looking_up_costs_two_comparisons_however_many_are_kept(store, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 3, size=(60, 40)).tolist()
    kept = [[5] * MIN_TOKENS + row for row in rows]
    kept += [kept[0][:length] for length in range(MIN_TOKENS, 40, 3)]
    for tokens in kept:
        keep(store, tokens)
    compared = []

    def counted(a, b, common=prefix_store._common_length):
        compared.append(a)
        return common(a, b)

    monkeypatch.setattr(prefix_store, "_common_length", counted)
    for asked in [[5] * MIN_TOKENS + row for row in np.random.default_rng(1).integers(0, 3, size=(30, 30)).tolist()]:
        longest = max(
            next((i for i, pair in enumerate(zip(asked, k, strict=False)) if len({*pair}) > 1), len(k)) for k in kept
        )
        compared.clear()
        assert store.find(asked, len(asked)).length == min(longest, len(asked))
        assert len(compared) <= 2


def test_the_same_tokens_are_kept_once(store):
    keep(store, list(range(20)))
    keep(store, list(range(30)))
    keep(store, list(range(20)))
    assert (len(store), store.num_tokens) == (2, 50)


def test_a_longer_one_replaces_the_one_it_began_with(store):
    keep(store, list(range(20)))
    match = store.find(list(range(30)), 29)
    keep(store, list(range(30)), replaces=match)
    assert len(store) == 1
    assert store.num_tokens == 30
    partial = store.find([*range(18), 90, 91], 19)
    keep(store, [*range(18), 90, 91], replaces=partial)
    assert len(store) == 2


def test_least_recently_used_goes_when_the_budget_is_full(store, model):
    cache = model.cache
    used = cache.budget_bytes
    cache.budget_bytes = cache.num_bytes() + 50 * cache.bytes_per_token
    try:
        first, second, third = ([start + i for i in range(20)] for start in (0, 30, 60))
        keep(store, first)
        keep(store, second)
        assert store.find(first, 20)
        keep(store, third)
        assert store.find(second, 20) is None
        assert store.find(first, 20) and store.find(third, 20)
        cache.budget_bytes = cache.num_bytes() + 20 * cache.bytes_per_token
        store.fit()
        assert len(store) == 1
        keep(store, list(range(100, 125)))  # larger than all there is
        assert store.num_bytes() <= 20 * cache.bytes_per_token
    finally:
        cache.budget_bytes = used


def test_change_of_weights_empties_it_and_stale_rows_are_not_kept(store, model):
    before = model.weights.num_changes
    keep(store, list(range(20)))
    name = "model.norm.weight"
    model.weights.assign({name: model.weights.view(name).clone()})
    assert store.find(list(range(20)), 20) is None
    assert len(store) == 0
    store.keep(0, list(range(20)), before)
    assert len(store) == 0


def test_disabled_store_keeps_nothing(model):
    store = PrefixStore(model.cache, lambda: 0, enabled=False)
    store.keep(0, list(range(40)), 0)
    assert store.find(list(range(40)), 39) is None


@torch.inference_mode()
def test_reading_on_from_kept_tokens_equals_reading_all(store, model):
    rng = np.random.default_rng(0)
    whole = [rng.integers(0, 250, size).tolist() for size in (50, 33, 41)]
    kept = [30, 17, 40]
    expected = [model.prefill(torch.tensor([tokens]), 3)[0].clone() for tokens in whole]
    for tokens, count in zip(whole, kept, strict=True):
        model.prefill(torch.tensor([tokens]), 0)
        keep(store, tokens[:count])
    for cache in (*model.cache.keys, *model.cache.values):
        cache.zero_()
    unread = [len(tokens) - count for tokens, count in zip(whole, kept, strict=True)]
    padded = torch.zeros(3, max(unread), dtype=torch.int64)
    for row, (tokens, count) in enumerate(zip(whole, kept, strict=True)):
        match = store.find(tokens, len(tokens) - 1)
        assert match.length == count
        store.restore(match, row)
        padded[row, : unread[row]] = torch.tensor(tokens[count:])
    hidden = model.extend(padded, 0, torch.tensor(kept), torch.tensor(unread))
    for row in range(3):
        torch.testing.assert_close(hidden[row, : unread[row]], expected[row][kept[row] :], atol=1e-5, rtol=1e-5)
    # The cache now is what reading everything would have left: decoding goes on equally.
    lengths = torch.tensor([len(tokens) for tokens in whole])
    after = model.decode(torch.tensor([1, 2, 3]), lengths, int(lengths.max()) + 1)
    for row, tokens in enumerate(whole):
        model.prefill(torch.tensor([[*tokens, row + 1]]), 3)
        alone = model.prefill(torch.tensor([[*tokens, row + 1]]), 3)[0, -1]
        torch.testing.assert_close(after[row], alone, atol=1e-4, rtol=1e-4)
