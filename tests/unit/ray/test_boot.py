"""Which Ray a run uses: the one that it is told, else its own."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import ray
from ray._raylet import Config

from slime.ray import boot


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch, tmp_path):
    """What `connect` leaves in it is meant for the processes of one run, and Ray reads it again at its next start."""
    before = dict(os.environ)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "no token"))
    yield
    os.environ.clear()
    os.environ.update(before)
    Config.initialize("")


@pytest.fixture
def init_calls(monkeypatch):
    calls = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    return calls


def test_another_cluster_on_the_machine_is_not_joined_by_chance(init_calls):
    assert boot.connect(SimpleNamespace(ray_address=None, omp_num_threads=1, has_gpu=False), 2)
    assert (init_calls[0]["address"], init_calls[0]["num_gpus"]) == ("local", 2)


def test_what_is_set_for_the_start_holds_in_this_process_also_with_a_mode_of_authentication(monkeypatch):
    """Ray has read its environment when it was imported, and reads it again only where this mode is not set."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "77")
    found = []
    monkeypatch.setattr(ray, "init", lambda **_: found.append(Config.worker_register_timeout_seconds()))
    boot.connect(SimpleNamespace(ray_address=None, omp_num_threads=1, has_gpu=False), 2)
    assert found == [77]


def test_a_named_cluster_is_joined(init_calls, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not boot.connect(SimpleNamespace(ray_address=None, omp_num_threads=1, has_gpu=False), 2)
    assert init_calls[0]["address"] == "auto" and "num_gpus" not in init_calls[0]


def test_a_head_of_our_own_starts_no_services_that_nobody_asks(monkeypatch):
    from ray._private import node, utils

    before = (node.Node.start_monitor, node.Node.start_api_server, utils.get_dashboard_dependency_error)
    seen = []

    def init(**_):
        head = object.__new__(node.Node)
        seen.append((head.start_monitor(), head.start_api_server(include_dashboard=False, raise_on_failure=False)))
        seen.append(type(utils.get_dashboard_dependency_error()))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    boot.connect(SimpleNamespace(ray_address=None, omp_num_threads=1, has_gpu=False), 2)
    assert seen == [(None, None), ImportError]
    assert before == (node.Node.start_monitor, node.Node.start_api_server, utils.get_dashboard_dependency_error)
