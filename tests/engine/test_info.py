"""GET routes: what a router and a monitor read."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("path", ["/health", "/ready", "/health_generate"])
def test_health_routes_answer_200(api, path):
    assert api.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_info_has_what_the_router_reads_at_registration(api, path, model_dir):
    info = api.get(path).json()
    assert info["model_path"] == str(model_dir)
    assert info["is_generation"] is True
    assert info["disaggregation_mode"] == "null"
    assert {"served_model_name", "tokenizer_path", "model_type", "architectures", "weight_version"} <= set(info)


def test_server_info_has_sizes(api):
    info = api.client.server_info()
    sizes = {"tp_size", "dp_size", "max_total_num_tokens", "internal_states"}
    assert sizes | {"version", "model_path", "served_model_name", "tokenizer_path", "disaggregation_mode"} <= set(info)


def test_models_list_names_the_model(api, model_dir):
    assert api.get("/v1/models").json()["data"][0]["id"] == str(model_dir)


def test_idle_loads_are_zero(api):
    assert api.client.num_requests() == 0


@pytest.mark.embedded_only
def test_old_load_route_answers(api):
    assert api.get("/get_load").json()[0]["num_reqs"] == 0


@pytest.mark.embedded_only
def test_metrics_count_generated_tokens(api):
    def value(name: str) -> float:
        lines = [line for line in api.get("/metrics").text.splitlines() if line.startswith(f"sglang:{name}{{")]
        assert len(lines) == 1
        return float(lines[0].rsplit(" ", 1)[1])

    before = value("generation_tokens_total")
    api.greedy([1, 2], 7)
    assert value("generation_tokens_total") == before + 7
    assert value("num_running_reqs") == 0
    assert value("gen_throughput") > 0
