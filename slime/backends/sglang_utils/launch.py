"""The command line that starts one rollout engine: SGLang, or the embedded engine where no GPU is.

This is the one place that knows the two kinds apart; everything after the launch speaks HTTP.
"""

from __future__ import annotations

import os
import sys

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: What SGLang needs to run without a GPU and without its compiled kernels.
CPU_FLAGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 20000,
    "sleep_on_idle": True,  # its scheduler would spin on a whole core
}
#: What would lead an interpreter of another environment to our packages.
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def engine_command(args, *, rank: int, host: str, port: int, base_device: int) -> list[str]:
    """Command of engine ``rank`` listening on ``host:port``; ``base_device`` is its first device on the node."""
    if args.rollout_engine == "embedded":
        return _embedded_command(args, rank=rank, host=host, port=port)
    return _sglang_command(args, rank=rank, host=host, port=port, base_device=base_device)


def engine_environment(args) -> dict[str, str]:
    """Environment of the engine process."""
    environment = dict(os.environ)
    if args.rollout_engine == "sglang":
        if args.sglang_python:
            for name in _FOREIGN:
                environment.pop(name, None)
        if not args.has_gpu:
            environment |= cpu_environment(args.omp_num_threads)
    return environment


def cpu_environment(num_threads: int) -> dict[str, str]:
    """Variables that SGLang needs to run on a CPU. More threads than free cores make it many times slower."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "OMP_NUM_THREADS": str(num_threads),
    }


def flag_words(flags: dict) -> list[str]:
    """Command-line words of flags given as name -> value; True stands alone, None and False are left out."""
    words: list[str] = []
    for name, value in sorted(flags.items()):
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, (list, tuple)):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words


def _embedded_command(args, *, rank: int, host: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "slime.engine", "--model-path", args.hf_checkpoint]
    command += ["--host", host, "--port", str(port), "--dtype", _DTYPES[args.rollout_precision]]
    command += ["--random-seed", str(args.seed + rank), "--log-level", args.sglang_log_level]
    command += ["--num-threads", str(args.omp_num_threads)]
    command += ["--weight-update-timeout-s", str(60 * args.distributed_timeout_minutes)]
    for flag, value in (
        ("--context-length", args.sglang_context_length),
        ("--max-running-requests", args.sglang_max_running_requests),
    ):
        if value is not None:
            command += [flag, str(value)]
    for name in ("enable_deterministic_inference", "disable_radix_cache", "incremental_streaming_output"):
        if getattr(args, f"sglang_{name}"):
            command.append("--" + name.replace("_", "-"))
    if args.use_rollout_routing_replay:
        command.append("--enable-return-routed-experts")
    return command


def _sglang_command(args, *, rank: int, host: str, port: int, base_device: int) -> list[str]:
    """SGLang's own server; every ``--sglang-*`` flag that the user gave is passed on."""
    flags = {
        "model_path": args.hf_checkpoint,
        "host": host,
        "port": port,
        "dtype": _DTYPES[args.rollout_precision],
        "tp_size": args.rollout_num_gpus_per_engine,
        "random_seed": args.seed + rank,
        "skip_server_warmup": True,
        "enable_metrics": True,
        **({"base_gpu_id": base_device} if args.has_gpu else CPU_FLAGS),
        **_offload_flags(args, rank),
        "enable_return_routed_experts": args.use_rollout_routing_replay,
        **_lora_flags(args),
        **args.sglang_given,
    }
    return [args.sglang_python or sys.executable, "-m", "sglang.launch_server", *flag_words(flags)]


def _offload_flags(args, rank: int) -> dict:
    """Flags of an engine that shares its slots with the trainer and gives its memory up. The saver needs a GPU."""
    if not (args.has_gpu and args.offload_rollout and rank < args.num_shared_engines):
        return {}
    # In some rounds nothing is sent that could replace what was released.
    keeps = args.update_weights_interval > 1 or args.lora_sync == "adapter"
    return {"enable_memory_saver": True, "enable_weights_cpu_backup": keeps}


def _lora_flags(args) -> dict:
    """Flags of an engine that serves the base model and the adapters in training."""
    if args.lora_sync != "adapter":
        return {}
    count = len(args.lora_adapters)
    return {
        "enable_lora": True,
        "max_lora_rank": args.lora_rank,
        "lora_target_modules": args.target_modules,
        "max_loras_per_batch": count + 1,  # requests without an adapter count as one
    }
