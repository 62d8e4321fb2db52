"""Turn a GGUF file into an ordinary Hugging Face folder: safetensors, config, tokenizer, chat template.

Usage: convert_gguf_to_hf.py FILE.gguf OUT [--dtype float32|bfloat16]

Quantized weights are written out in full; nothing in the folder says that they once were quantized, so that transformers,
the engine and the trainer read it like any other checkpoint. OUT appears complete or not at all.
Needs the packages `gguf` and `accelerate`: pip install -e ".[examples]".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import stat
import sys
from pathlib import Path

DTYPES = ("float32", "bfloat16")
NEEDED = ("gguf", "accelerate")  # transformers reads GGUF files with both


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("gguf", type=Path, metavar="FILE.gguf", help="one file with all weights and the tokenizer")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: float32)")
    arguments = parser.parse_args(argv)
    try:
        convert(arguments.gguf, arguments.out, arguments.dtype)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        sys.exit(f"convert_gguf_to_hf: error: {error}")


def convert(gguf: Path, out: Path, dtype: str = "float32") -> Path:
    """Write the model of `gguf` to `out`; returns `out`.

    Raises:
        FileNotFoundError: no such file. ValueError: not a GGUF file, or `out` holds something already.
        ModuleNotFoundError: one of NEEDED is missing.
    """
    _check(gguf, out)
    unfinished = out.with_name(f".{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write(gguf, unfinished, dtype)
        _check_ordinary(unfinished)
        os.replace(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out


def _check(gguf: Path, out: Path) -> None:
    if not gguf.is_file():
        raise FileNotFoundError(f"{gguf} does not exist")
    with open(gguf, "rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{gguf} is not a GGUF file (its first bytes are not 'GGUF')")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; remove it or name another one")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f'reading GGUF files needs {", ".join(missing)}: pip install -e ".[examples]"')


def _write(gguf: Path, out: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent.resolve()), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
    # transformers refuses to save what it loaded from a quantized file, though all weights are plain tensors by now.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    mode = stat.S_IMODE((out / "config.json").stat().st_mode)
    for path in out.glob("*.safetensors"):  # the library makes them readable by their owner alone
        path.chmod(mode)


def _check_ordinary(folder: Path) -> None:
    """Our own bugs, or a transformers that saves differently: found here, not by the first reader of the folder."""
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config, "the config still calls the weights quantized"
    assert (folder / "tokenizer.json").exists(), "no tokenizer.json was written"
    assert list(folder.glob("*.safetensors")), "no weights were written"


if __name__ == "__main__":
    main()
