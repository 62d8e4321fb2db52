"""Quantise a Hugging Face folder to fp8 (e4m3): 128 x 128 blocks, or one scale per weight."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str] | None = None) -> None:
    """Convert and say how many weights were quantised."""
    from slime.utils.quantized_folder import fp8_config, quantize_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--save-dir", required=True)
    parser.add_argument("--strategy", choices=("block", "tensor"), default="block")
    parser.add_argument("--block-size", type=int, nargs=2, default=(128, 128), metavar=("ROWS", "COLUMNS"))
    args = parser.parse_args(argv)
    block = tuple(args.block_size) if args.strategy == "block" else None
    print(f"{quantize_folder(args.model_dir, args.save_dir, fp8_config(block))} weights are fp8 in {args.save_dir}")


if __name__ == "__main__":
    main()
