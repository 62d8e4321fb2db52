"""Quantise a Hugging Face folder to int4 in compressed-tensors' packed form, by rounding, without calibration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str] | None = None) -> None:
    """Convert and say how many weights were quantised."""
    from slime.utils.quantized_folder import int4_config, quantize_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--save-dir", required=True)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--is-symmetric", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ignore-rules", nargs="*", default=["lm_head", "re:.*mlp.gate$"])
    args = parser.parse_args(argv)
    config = int4_config(args.group_size, args.is_symmetric, args.ignore_rules)
    print(f"{quantize_folder(args.model_dir, args.save_dir, config)} weights are int4 in {args.save_dir}")


if __name__ == "__main__":
    main()
