"""Turn a Hugging Face folder into a Megatron checkpoint (torch_dist) and back: `slime convert`, tools/convert_*.py.

    slime convert hf-to-torch-dist --hf-checkpoint MODEL --save OUT [model flags] [parallel sizes]
    slime convert torch-dist-to-hf --input-dir OUT --origin-hf-dir MODEL --output-dir FOLDER

A result appears under its name when it is complete. Numbers keep the format that they have, unless a precision flag says
otherwise. One process does it; under torchrun each rank converts its part of the layout that the parallel flags describe.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import uuid
from pathlib import Path

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_PRECISION_FLAGS = ("--precision", "--bf16", "--fp16")
_TRACKER, _RELEASE = "latest_checkpointed_iteration.txt", "release"


def main(argv: list[str]) -> None:
    """Run `slime convert DIRECTION ...`."""
    commands = {"hf-to-torch-dist": hf_to_torch_dist, "torch-dist-to-hf": torch_dist_to_hf}
    if argv and argv[0] in commands:
        _say(commands[argv[0]](argv[1:]))
        return
    parser = argparse.ArgumentParser(
        prog="slime convert",
        description="Turn a Hugging Face folder into a Megatron checkpoint (torch_dist), or back.",
        allow_abbrev=False,
    )
    parser.add_argument("direction", choices=commands, help="what to make; each has its own --help")
    parser.parse_args(argv)


def hf_to_torch_dist(argv: list[str]) -> str:
    """Convert; returns the torch_dist directory.

    Raises: ValueError for flags that do not fit the model, or when the result is there already.
    """
    parser = _parser("hf-to-torch-dist", "Write a Megatron checkpoint (torch_dist) of a Hugging Face folder's weights.")
    parser.add_argument("--hf-checkpoint", required=True, metavar="MODEL", help="Hugging Face folder to convert")
    parser.add_argument("--save", required=True, metavar="OUT", help="folder of the result: --load or --ref-load OUT")
    known, rest = parser.parse_known_args(argv)
    final = Path(known.save).resolve() / _RELEASE
    _refuse_existing(final, known.force, "--save")
    args = _model_args(known.hf_checkpoint, rest, PRECISIONS.get(_dtype_of_config(known.hf_checkpoint)))
    chunks = _build(args)

    from slime.backends.megatron_utils import checkpoint

    checkpoint.load_weights(args, chunks, args.hf_checkpoint)
    partial = _shared_name(final)
    if _rank() == 0:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    _barrier()
    checkpoint.save_weights(str(partial), chunks)
    _barrier()
    if _rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        (final.parent / _TRACKER).write_text(_RELEASE)
    _barrier()
    return str(final)


def torch_dist_to_hf(argv: list[str]) -> str:
    """Convert; returns the Hugging Face folder.

    Raises: ValueError for flags that do not fit the model, or when the result is there already.
    """
    parser = _parser("torch-dist-to-hf", "Write a Hugging Face folder of a Megatron checkpoint's weights.")
    parser.add_argument(
        "--input-dir", required=True, metavar="DIR", help="torch_dist directory, or the folder of checkpoints"
    )
    parser.add_argument("--output-dir", required=True, metavar="FOLDER", help="Hugging Face folder to write")
    parser.add_argument(
        "--origin-hf-dir", required=True, metavar="MODEL", help="Hugging Face folder whose config and tokenizer it gets"
    )
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding; those of the origin when not given")
    parser.add_argument("--ckpt-step", type=int, help="which checkpoint of the folder; the latest when not given")
    known, rest = parser.parse_known_args(argv)
    final = Path(known.output_dir).resolve()
    _refuse_existing(final, known.force, "--output-dir")
    if known.vocab_size is not None:
        rest += ["--vocab-size", str(known.vocab_size)]

    from slime.backends.megatron_utils import cpu_compat

    cpu_compat.install()
    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights
    from slime.backends.megatron_utils.megatron_to_hf.writer import save_hf

    if not checkpoint.is_megatron_dir(known.input_dir):
        raise ValueError(f"--input-dir {known.input_dir}: not a Megatron checkpoint ({_TRACKER} or metadata.json)")
    directory = checkpoint.iteration_dir(known.input_dir, known.ckpt_step)
    args = _model_args(known.origin_hf_dir, rest, PRECISIONS.get(checkpoint.stored_dtype(directory)))
    chunks = _build(args)
    checkpoint.load_weights(args, chunks, str(directory))
    save_hf(export_hf_weights(chunks, args), args, str(final))
    return str(final)


def _parser(direction: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"slime convert {direction}",
        description=description,
        epilog="Further flags are those of a run: the model's shape (scripts/models), --precision, parallel sizes.",
        allow_abbrev=False,
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace what an earlier conversion wrote")
    return parser


def _refuse_existing(final: Path, force: bool, flag: str) -> None:
    if final.exists() and not force:
        raise ValueError(f"{flag}: {final} exists already; --force replaces it")


def _dtype_of_config(folder: str) -> str | None:
    from slime.config.model_shape import read_model_config, text_part

    config = read_model_config(folder, "--hf-checkpoint")
    text = text_part(config)
    return next((part[key] for part in (config, text) for key in ("torch_dtype", "dtype") if part.get(key)), None)


def _model_args(model: str, flags: list[str], precision: str | None):
    """The arguments of a run that would only build this model."""
    from slime.config import parse_args

    words = ["--hf-checkpoint", model, "--num-rollout", "0", "--debug-train-only", "--actor-num-nodes", "1"]
    words += ["--actor-num-gpus-per-node", os.environ.get("WORLD_SIZE", "1"), "--use-dynamic-batch-size"]
    words += ["--max-tokens-per-gpu", "1"]
    if precision is not None and not any(word.split("=")[0] in _PRECISION_FLAGS for word in flags):
        words += ["--precision", precision]
    return parse_args([*words, *flags])


def _build(args) -> list:
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.model_provider import build_chunks
    from slime.utils.http_utils import find_free_port

    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT")
    rank = int(os.environ.get("RANK", "0"))
    initialize.initialize(args, rank, args.world_size, address, int(port) if port else find_free_port())
    return build_chunks(args)


def _shared_name(final: Path) -> Path:
    """A name beside the result that all ranks agree on."""
    import torch.distributed as dist

    names = [final.with_name(f"{final.name}.partial-{uuid.uuid4().hex[:8]}")]
    dist.broadcast_object_list(names, src=0)
    return names[0]


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def run_tool(convert) -> None:
    """Entry point of a tools/ script."""
    from slime.cli import run_command

    run_command(lambda: _say(convert(sys.argv[1:])))


def _say(result: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(result)
