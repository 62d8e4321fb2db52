"""Which SGLang engines can release memory: those on trainer slots, and only when they are told to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.launch import engine_command


def command(rank: int, **changes) -> list[str]:
    args = {
        "rollout_engine": "sglang",
        "hf_checkpoint": "model",
        "rollout_precision": "bf16",
        "rollout_num_gpus_per_engine": 1,
        "seed": 1,
        "sglang_given": {},
        "use_rollout_routing_replay": False,
        "offload_rollout": True,
        "num_shared_engines": 2,
        "update_weights_interval": 1,
        "has_gpu": True,
        "sglang_python": None,
        "lora_sync": "merged",
    }
    return engine_command(SimpleNamespace(**(args | changes)), rank=rank, host="h", port=1, base_device=0)


@pytest.mark.parametrize(
    ("rank", "changes", "saver", "backup"),
    [
        (1, {}, True, False),
        (1, {"update_weights_interval": 2}, True, True),  # a round without a sync needs its old weights back
        (2, {}, False, False),
        (1, {"offload_rollout": False}, False, False),
        (1, {"has_gpu": False}, False, False),
    ],
)
def test_memory_saver_of_shared_engines(rank, changes, saver, backup):
    words = command(rank, **changes)
    assert ("--enable-memory-saver" in words, "--enable-weights-cpu-backup" in words) == (saver, backup)
