"""The embedded engine answers what SGLang answered when `make conformance` asked it, key by key and number by number.

The replies in tests/assets/sglang come from a real SGLang 0.5.23 on the same model; `ACCEPTED`, `EXTRA_KEYS` and
`MISSING_KEYS` say what differs on purpose.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from tests.engine.engine_process import serving
from tests.engine.recorded import ACCEPTED, EXTRA_KEYS, MISSING_KEYS
from tools.conformance.replies import differences, exchange, folded, make_model

pytestmark = pytest.mark.skipif("SLIME_ENGINE_URL" in os.environ, reason="compares the embedded engine with records")

RECORDS = json.loads((Path(__file__).parents[1] / "assets/sglang/replies.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def http(model):
    with serving(model) as (url, _), httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        yield http


def test_replies_are_those_of_sglang(http, model):
    """One test, in the recorded order: some requests change what later ones see."""
    failures = []
    for record in RECORDS:
        request = json.loads(json.dumps(record).replace('"MODEL"', json.dumps(str(model))))
        expected = {"status": request.pop("status"), "reply": request.pop("reply")}
        got = exchange(http, request)
        if record["name"] not in ACCEPTED:
            found = differences(folded(expected), folded(got), EXTRA_KEYS, MISSING_KEYS)
            failures += [f"{record['name']}: {text}" for text in found]
    assert not failures, "\n".join(failures)


def test_what_is_accepted_was_recorded():
    assert ACCEPTED <= {record["name"] for record in RECORDS}
