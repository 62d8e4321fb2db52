"""Which Ray a run uses: the one that it is told, else its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from slime.ray import boot


@pytest.fixture
def init_calls(monkeypatch):
    calls = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    return calls


def test_another_cluster_on_the_machine_is_not_joined_by_chance(init_calls):
    assert boot.connect(SimpleNamespace(ray_address=None, omp_num_threads=1, has_gpu=False), 2)
    assert (init_calls[0]["address"], init_calls[0]["num_gpus"]) == ("local", 2)


def test_a_named_cluster_is_joined(init_calls, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not boot.connect(SimpleNamespace(ray_address=None, omp_num_threads=1, has_gpu=False), 2)
    assert init_calls[0]["address"] == "auto" and "num_gpus" not in init_calls[0]
