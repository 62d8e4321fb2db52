"""The quickstart's task: sort digits, six of them there. ``sort 493021=`` -> ``012349``, graded by exact match.

The held-out set is chosen by a hash of the prompt, so no prompt is ever in both sets.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

NUM_DIGITS = 6
NUM_TRAIN, NUM_HELD_OUT = 9000, 512
MAX_NEW_TOKENS = NUM_DIGITS + 1  # the digits and the end token


async def exact_match(args, sample, **kwargs) -> float:
    """Reward: 1.0 when the response is the label and the model ended it itself, else 0.0."""
    ended = sample.status == type(sample).Status.COMPLETED
    return float(ended and sample.response.removesuffix("<|im_end|>") == sample.label)


def write_data(
    directory: Path, seed: int, digits: int = NUM_DIGITS, num_train: int = NUM_TRAIN, num_held_out: int = NUM_HELD_OUT
) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``held_out.jsonl`` with rows {"prompt", "label"}. Returns both paths."""
    generator = random.Random(seed)
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    while len(train) < num_train or len(held_out) < num_held_out:
        word = "".join(generator.choice("0123456789") for _ in range(digits))
        prompt = f"sort {word}="
        is_held_out = zlib.crc32(prompt.encode()) % 10 == 0
        (held_out if is_held_out else train)[prompt] = "".join(sorted(word))
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, rows, count in zip(paths, (train, held_out), (num_train, num_held_out), strict=True):
        lines = [json.dumps({"prompt": prompt, "label": label}) for prompt, label in list(rows.items())[:count]]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths
