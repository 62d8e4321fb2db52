"""The command line that starts one rollout engine: SGLang on GPUs, the embedded engine elsewhere.

This is the one place that knows the two kinds apart; everything after the launch speaks HTTP.
"""

from __future__ import annotations

import sys

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def engine_command(args, *, rank: int, host: str, port: int, base_device: int) -> list[str]:
    """Command of engine ``rank`` listening on ``host:port``; ``base_device`` is its first device on the node."""
    if args.rollout_engine == "embedded":
        return _embedded_command(args, rank=rank, host=host, port=port)
    return _sglang_command(args, rank=rank, host=host, port=port, base_device=base_device)


def _embedded_command(args, *, rank: int, host: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "slime.engine", "--model-path", args.hf_checkpoint]
    command += ["--host", host, "--port", str(port), "--dtype", _DTYPES[args.rollout_precision]]
    command += ["--random-seed", str(args.seed + rank), "--log-level", args.sglang_log_level]
    command += ["--num-threads", str(args.omp_num_threads)]
    for flag, value in (
        ("--context-length", args.sglang_context_length),
        ("--max-running-requests", args.sglang_max_running_requests),
    ):
        if value is not None:
            command += [flag, str(value)]
    if args.sglang_enable_deterministic_inference:
        command.append("--enable-deterministic-inference")
    return command


def _sglang_command(args, *, rank: int, host: str, port: int, base_device: int) -> list[str]:
    """SGLang's own server; every ``--sglang-*`` flag that the user gave is passed on."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.hf_checkpoint]
    command += ["--host", host, "--port", str(port), "--dtype", _DTYPES[args.rollout_precision]]
    command += ["--tp-size", str(args.rollout_num_gpus_per_engine), "--base-gpu-id", str(base_device)]
    command += ["--random-seed", str(args.seed + rank), "--skip-server-warmup", "--enable-metrics"]
    if args.offload_rollout and rank < args.num_shared_engines:
        command.append("--enable-memory-saver")
        if args.update_weights_interval > 1:  # in some rounds nothing is sent that could replace what was released
            command.append("--enable-weights-cpu-backup")
    for name, value in sorted(args.sglang_given.items()):
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif isinstance(value, (list, tuple)):
            command += [flag, *map(str, value)]
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command
