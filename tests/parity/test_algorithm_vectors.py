"""Every case of tests/assets/algorithm-vectors.json against an implementation, this package's by default.

Set VECTOR_ADAPTER to the dotted name of a module with an OPS table to check another one.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest
import torch

ASSET = Path(__file__).resolve().parents[1] / "assets" / "algorithm-vectors.json"
VECTORS = json.loads(ASSET.read_text())["vectors"]
NOT_BUILT = {"delta_encode": "weight delta transport not built"}


def _ops() -> dict:
    return importlib.import_module(os.environ.get("VECTOR_ADAPTER", "tests.parity.vector_adapter")).OPS


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _compare(actual, expected, where: str) -> None:
    if isinstance(expected, dict):
        for key, item in expected.items():
            assert key in actual, f"{where}.{key} is missing"
            _compare(actual[key], item, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), f"{where}: {actual} has another length than {expected}"
        for position, item in enumerate(expected):
            _compare(actual[position], item, f"{where}[{position}]")
    else:
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-7), where


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_vector_matches_reference(vector):
    if vector["op"] in NOT_BUILT and vector["op"] not in _ops():
        pytest.xfail(NOT_BUILT[vector["op"]])
    _compare(_plain(_ops()[vector["op"]](vector["inputs"])), vector["expected"], vector["id"])


def test_kit_covers_every_operation():
    assert {vector["op"] for vector in VECTORS} <= set(_ops()) | set(NOT_BUILT)
