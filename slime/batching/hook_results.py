"""What users' conversion and reward hooks give back, checked before it is trained on.

An error names the flag and the hook, what is wrong, and the form that is expected. Values are taken as they are, except that
tensors of rewards become lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slime.algorithms.reduce import rollout_mask_sums
from slime.utils.hook_calls import call_hook, wrong
from slime.utils.types import Sample

REWARDS = "custom_reward_post_process_path"
CONVERT = "custom_convert_samples_to_train_data_path"

REQUIRED_COLUMNS = (
    "tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "loss_masks",
)  # fmt: skip


def custom_rewards(args, samples: list[Sample]) -> tuple[list[Any], list[float]]:
    """(raw rewards, training rewards) of the user's hook.

    Raises: ValueError for anything but two lists of one entry per sample, the second of finite numbers.
    """
    path, result = args.custom_reward_post_process_path, call_hook(args, REWARDS, args, samples)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise wrong(REWARDS, path, f"returned {_shown(result)}")
    raw, rewards = (values.tolist() if hasattr(values, "tolist") else values for values in result)
    for name, values in (("raw rewards", raw), ("training rewards", rewards)):
        if not isinstance(values, Sequence) or len(values) != len(samples):
            raise wrong(REWARDS, path, f"returned {_shown(values)} as {name} of {len(samples)} samples")
    for sample, reward in zip(samples, rewards, strict=True):
        if not _is_finite(reward):
            raise wrong(REWARDS, path, f"returned the training reward {reward!r} for sample {sample.index}")
    return list(raw), [float(reward) for reward in rewards]


def custom_train_data(args, samples: list[Sample]) -> dict[str, Any]:
    """The train dict of the user's conversion; rollout ids and mask sums are added where it leaves them out.

    Raises: ValueError for a missing column, or columns that do not fit together.
    """
    path, data = args.custom_convert_samples_to_train_data_path, call_hook(args, CONVERT, args, samples)
    if not isinstance(data, dict):
        raise wrong(CONVERT, path, f"returned {_shown(data)}")
    missing = [name for name in REQUIRED_COLUMNS if name not in data]
    if missing:
        raise wrong(CONVERT, path, f"returned a dict without {', '.join(missing)}")
    count = len(data["tokens"])
    uneven = {name: len(data[name]) for name in REQUIRED_COLUMNS if name != "raw_reward" and len(data[name]) != count}
    if uneven or not count:
        raise wrong(
            CONVERT, path, f"returned {count} rows of tokens" + "".join(f", {n} {k}" for k, n in uneven.items())
        )
    for row, (tokens, length, mask) in enumerate(
        zip(data["tokens"], data["response_lengths"], data["loss_masks"], strict=True)
    ):
        if len(mask) != length or not 0 <= length < max(1, len(tokens)):
            what = f"{len(tokens)} tokens, a response of {length} and a loss mask of {len(mask)}"
            raise wrong(CONVERT, path, f"returned in row {row} {what}; the response has to be shorter than the tokens")
    data = dict(data)
    data.setdefault("rollout_ids", list(range(count)))
    if "rollout_mask_sums" not in data:
        data["rollout_mask_sums"] = rollout_mask_sums(
            [int(sum(mask)) for mask in data["loss_masks"]], data["rollout_ids"]
        )
    return data


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _shown(value: Any) -> str:
    """A value in an error message: its kind and how many entries, or itself when it is short."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
