"""The recorded flags equal what the installed libraries have."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "slime" / "config"


def load_tool(name: str):
    """Import a script of tools/ by path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_megatron_fields_equal_the_installed_dataclasses():
    pytest.importorskip("megatron.core")
    recorded = (CONFIG / "megatron_fields.json").read_text()
    assert recorded == load_tool("gen_megatron_flags").render(), "run python tools/gen_megatron_flags.py"


def test_router_flags_equal_the_installed_router():
    pytest.importorskip("sglang_router")
    recorded = (CONFIG / "router_flags.json").read_text()
    assert recorded == load_tool("gen_router_flags").render(), "run python tools/gen_router_flags.py"


def test_sglang_record_names_its_release_and_hides_what_the_framework_sets():
    record = json.loads((CONFIG / "sglang_flags.json").read_text())
    assert record["sglang"] == "0.5.23"
    dests = {entry["dest"].removeprefix("sglang_") for entry in record["flags"].values()}
    assert len(dests) > 400
    assert not dests & load_tool("gen_sglang_flags").HIDDEN


def test_sglang_tool_reads_annotated_fields_without_importing(tmp_path):
    fields = tmp_path / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields / "model.py").write_text(
        "import not_installed\n"
        "class Model:\n"
        "    context_length: A[Optional[int], Arg(help='h', type_parser=human_readable_int)] = None\n"
        "    tags: A[Optional[List[str]], 'h'] = None\n"
        "    fast: A[bool, 'h'] = False\n"
        "    tri: A[Optional[bool], Arg(help='h', action=argparse.BooleanOptionalAction)] = None\n"
        "    dp_size: A[int, Arg(help='h', cli_name='--data-parallel-size', aliases=['--dp-size'])] = 1\n"
        "    hidden: A[int, Arg(help='h', no_cli=True)] = 1\n"
        "    port: A[int, 'h'] = 30000\n"
        "    plain: int = 3\n"
    )
    flags = load_tool("gen_sglang_flags").snapshot(tmp_path, "1.2.3")["flags"]
    assert flags["--sglang-context-length"]["type"] == "int"
    assert flags["--sglang-tags"]["nargs"] == "+"
    assert flags["--sglang-fast"]["action"] == "true"
    assert flags["--sglang-tri"]["action"] == "bool"
    assert flags["--sglang-data-parallel-size"]["aliases"] == ["--sglang-dp-size"]
    assert flags["--sglang-data-parallel-size"]["dest"] == "sglang_dp_size"
    assert not {"--sglang-hidden", "--sglang-port", "--sglang-plain"} & set(flags)
