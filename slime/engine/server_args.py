"""Command line of the embedded engine.

Standard library only, so that `slime engine --help` is instant. Does not know what the flags mean to the model: values
that depend on config.json (context length, dtype `auto`) are resolved at start by `slime.engine.server`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field

VERSION = "0.5.23"
"""The SGLang release whose native HTTP API is spoken."""

DTYPES = ("auto", "float32", "bfloat16")


@dataclass
class ServerArgs:
    """Settings of one engine process, as given."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "auto"
    context_length: int | None = None
    max_running_requests: int = 256
    mem_bytes: int = 1 << 30
    random_seed: int = 0
    weight_version: str = "default"
    served_model_name: str | None = None
    log_level: str = "info"
    parent_pid: int | None = None
    num_threads: int = 1
    weight_update_timeout_s: float = 300.0
    enable_deterministic_inference: bool = False
    disable_radix_cache: bool = False
    incremental_streaming_output: bool = False
    enable_return_routed_experts: bool = False
    is_embedding: bool = False
    lora_paths: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """Return the settings by name, for /server_info."""
        return asdict(self)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m slime.engine`."""
    parser = argparse.ArgumentParser(prog="slime engine", description="Embedded engine with SGLang's native HTTP API.")
    default = ServerArgs(model_path="")
    add = parser.add_argument
    add("--model-path", required=True, help="Hugging Face folder: config.json, safetensors, tokenizer.json")
    add("--host", default=default.host)
    add("--port", type=int, default=default.port)
    add(
        "--dtype",
        choices=DTYPES,
        default=default.dtype,
        help="dtype of weights and KV cache; auto = that of config.json",
    )
    add("--context-length", type=int, help="longest prompt + output; default from config.json, at most 32768")
    add("--max-running-requests", type=int, default=default.max_running_requests)
    add("--mem-bytes", type=int, default=default.mem_bytes, help="bytes for the KV cache; more requests than fit wait")
    add("--random-seed", type=int, default=default.random_seed, help="seed of requests without sampling_seed")
    add("--weight-version", default=default.weight_version, help="version reported until the first weight update")
    add("--served-model-name", help="name reported by /v1/models; default: the model path")
    add("--log-level", default=default.log_level, choices=("debug", "info", "warning", "error"))
    add("--parent-pid", type=int, help="exit when the parent is no longer this process")
    add("--num-threads", type=int, default=default.num_threads, help="torch threads")
    add(
        "--weight-update-timeout-s",
        type=float,
        default=default.weight_update_timeout_s,
        help="deadline of the group rendezvous and of each weight broadcast",
    )
    add(
        "--enable-deterministic-inference",
        action="store_true",
        help="every request is computed alone: its tokens and log-probs do not depend on what else runs (slower)",
    )
    add(
        "--disable-radix-cache",
        action="store_true",
        help="read every prompt anew, also one that begins like an earlier request",
    )
    add(
        "--incremental-streaming-output",
        action="store_true",
        help="pieces of a /generate stream hold what is new; otherwise the answer so far",
    )
    add(
        "--enable-return-routed-experts",
        action="store_true",
        help="remember which experts read each token, for requests with return_routed_experts",
    )
    add(
        "--is-embedding",
        action="store_true",
        help="serve a reward model (sequence classifier with one output) by POST /classify; nothing is generated",
    )
    add("--lora-paths", nargs="+", default=[], help="PEFT adapters to load at start: name=folder")
    return parser


def parse(argv: list[str] | None = None) -> ServerArgs:
    """Parse the command line (sys.argv when None).

    Raises: SystemExit from argparse for malformed flags, ValueError for values out of range.
    """
    given = vars(build_parser().parse_args(argv))
    args = ServerArgs(**{**given, "lora_paths": _adapters(given["lora_paths"])})
    for name in ("max_running_requests", "mem_bytes", "num_threads", "weight_update_timeout_s"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected a positive value")
    if not 0 < args.port < 65536:
        raise ValueError(f"--port {args.port}: expected 1..65535")
    if args.context_length is not None and args.context_length <= 1:
        raise ValueError(f"--context-length {args.context_length}: expected at least 2")
    return args


def _adapters(words: list[str]) -> dict[str, str]:
    """Read name=folder words; a bare folder is its own name, as with SGLang."""
    return dict(word.split("=", 1) if "=" in word else (word, word) for word in words)
