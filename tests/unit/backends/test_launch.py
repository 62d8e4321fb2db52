"""Command and environment of an engine: embedded, SGLang on GPUs, SGLang on a CPU in another environment."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.launch import engine_command, engine_environment, flag_words


@pytest.fixture
def args() -> SimpleNamespace:
    return SimpleNamespace(
        rollout_engine="sglang",
        hf_checkpoint="/model",
        rollout_precision="fp32",
        rollout_num_gpus_per_engine=1,
        seed=5,
        has_gpu=False,
        omp_num_threads=1,
        distributed_timeout_minutes=0.5,
        sglang_python="/other/bin/python",
        sglang_given={},
        offload_rollout=False,
        use_rollout_routing_replay=False,
        num_shared_engines=0,
        sglang_log_level="warning",
        sglang_context_length=None,
        sglang_max_running_requests=None,
        sglang_disable_radix_cache=True,
        sglang_incremental_streaming_output=False,
        sglang_enable_deterministic_inference=False,
        lora_sync="merged",
    )


def command_of(args) -> list[str]:
    return engine_command(args, rank=2, host="127.0.0.1", port=31000, base_device=3)


def test_sglang_on_a_cpu_gets_its_flags_variables_and_interpreter(args, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    command = command_of(args)
    assert command[:3] == ["/other/bin/python", "-m", "sglang.launch_server"]
    text = " ".join(command)
    for words in (
        "--device cpu",
        "--attention-backend torch_native",
        "--random-seed 7",
        "--dtype float32",
        "--port 31000",
    ):
        assert words in text
    assert "--base-gpu-id" not in text
    environment = engine_environment(args)
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "PYTHONPATH" not in environment


def test_sglang_on_gpus_gets_its_device_and_no_cpu_flags(args, monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    args.has_gpu, args.sglang_python = True, None
    command = command_of(args)
    assert command[0] == sys.executable
    assert "--base-gpu-id 3" in " ".join(command)
    assert "--device" not in command
    assert "SGLANG_USE_CPU_ENGINE" not in engine_environment(args)


def test_flags_of_the_user_win(args):
    args.sglang_given = {"max_total_tokens": 99, "sleep_on_idle": False, "served_model_name": "m"}
    text = " ".join(command_of(args))
    assert "--max-total-tokens 99" in text
    assert "20000" not in text
    assert "--sleep-on-idle" not in text


def test_embedded_engine_takes_the_flags_that_it_shares_with_sglang(args):
    args.rollout_engine, args.sglang_context_length = "embedded", 64
    command = command_of(args)
    assert command[:3] == [sys.executable, "-m", "slime.engine"]
    assert {"--context-length", "64", "--disable-radix-cache"} <= set(command)
    assert command[command.index("--weight-update-timeout-s") + 1] == "30.0"


@pytest.mark.parametrize("engine", ["sglang", "embedded"])
def test_engines_keep_experts_when_training_replays_them(args, engine):
    args.rollout_engine = engine
    assert "--enable-return-routed-experts" not in command_of(args)
    args.use_rollout_routing_replay = True
    assert "--enable-return-routed-experts" in command_of(args)


def test_flag_words():
    assert flag_words({"b": True, "a_x": 1, "c": None, "d": False, "e": [1, "z"]}) == [
        "--a-x",
        "1",
        "--b",
        "--e",
        "1",
        "z",
    ]


def test_sglang_that_gets_adapters_alone_is_started_for_them(args):
    args.lora_sync, args.lora_adapters, args.lora_rank, args.target_modules = "adapter", ["a", "b"], 16, ["q_proj"]
    words = command_of(args)
    for flag, value in (("--max-lora-rank", "16"), ("--lora-target-modules", "q_proj"), ("--max-loras-per-batch", "3")):
        assert words[words.index(flag) + 1] == value
    assert "--enable-lora" in words
