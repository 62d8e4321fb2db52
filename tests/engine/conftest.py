"""Conformance suite of the engine API: runs against SLIME_ENGINE_URL, or against an embedded engine started here.

With SLIME_ENGINE_URL set, SLIME_ENGINE_KIND says what it is (sglang: tests marked `embedded_only` are skipped), SLIME_ENGINE_MODEL names the folder of the model that it serves (a byte-level tokenizer as in
`slime.utils.tiny_model` is assumed) and SLIME_ENGINE_OTHER_MODEL a second folder of the same shapes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from slime.utils.engine_client import EngineError
from slime.utils.tiny_model import make_tiny_model
from tests.engine.engine_process import Api, serving


def pytest_collection_modifyitems(items) -> None:
    if os.environ.get("SLIME_ENGINE_KIND") == "sglang":
        for item in items:
            if item.get_closest_marker("embedded_only"):
                item.add_marker(pytest.mark.skip(reason="of the embedded engine alone"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    if "SLIME_ENGINE_URL" in os.environ:
        return Path(os.environ["SLIME_ENGINE_MODEL"])
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.2, max_positions=4096)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory) -> Path:
    """Same shapes, other weights."""
    if "SLIME_ENGINE_URL" in os.environ:
        return Path(os.environ["SLIME_ENGINE_OTHER_MODEL"])
    return make_tiny_model(tmp_path_factory.mktemp("other"), init_std=0.2, max_positions=4096, seed=1)


@pytest.fixture(scope="session")
def engine_url(model_dir) -> str:
    if "SLIME_ENGINE_URL" in os.environ:
        yield os.environ["SLIME_ENGINE_URL"]
        return
    with serving(model_dir, "--max-running-requests", "16", "--weight-update-timeout-s", "60") as (url, _):
        yield url


@pytest.fixture(scope="session")
def shared_api(engine_url) -> Api:
    api = Api(engine_url)
    yield api
    api.close()


@pytest.fixture
def api(shared_api) -> Api:
    """The engine, idle before and after the test."""
    yield shared_api
    shared_api.client.abort()
    shared_api.client.continue_generation()
    shared_api.client.flush_cache(60)


@pytest.fixture
def original_weights(api, model_dir):
    """Put the original weights back after the test."""
    yield
    with contextlib.suppress(EngineError):  # SGLang refuses it when none was begun
        api.client.end_weight_update()
    api.client.update_weights_from_disk(str(model_dir), weight_version="default")
