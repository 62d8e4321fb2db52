"""What stands against the evaluation of a run: values of sets out of range, settings that need each other, no evaluator.

Checks read; `slime.config.eval_datasets` resolves the sets. Rows are not looked at.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from slime.config.eval_datasets import EvalDatasetConfig, where
from slime.config.paths import split_file_hook
from slime.config.rollout import RM_TYPES

FULLY_ASYNC = "slime.rollout.fully_async_rollout."
BUILT_IN = "slime.rollout.sglang_rollout.generate_rollout"
SFT_ROLLOUT = "slime.rollout.sft_rollout."
"""Makes samples of rows, without engines; the trainer computes the loss of evaluation sets."""
MEDIA = ("image", "video", "audio")

#: Field -> (least value, whether the least value itself is refused, greatest value).
_NUMBERS: dict[str, tuple[float, bool, float]] = {
    "n_samples_per_eval_prompt": (1, False, float("inf")),
    "temperature": (0, False, float("inf")),
    "top_p": (0, True, 1),
    "top_k": (-1, False, float("inf")),
    "max_response_len": (1, False, float("inf")),
    "min_new_tokens": (0, False, float("inf")),
    "repetition_penalty": (0, True, 2),
    "min_eval_samples": (1, False, float("inf")),
    "eval_early_stop_remaining": (1, False, float("inf")),
    "eval_early_stop_idle_timeout": (0, True, float("inf")),
}
_WHOLE = {"n_samples_per_eval_prompt", "top_k", "max_response_len", "min_new_tokens", "min_eval_samples"}


def problems(args: argparse.Namespace, given: set[str]) -> Iterator[str]:
    """Give every problem of the evaluation that was asked for."""
    if args.group_rm and args.eval_datasets:
        yield "--group-rm is not supported in evaluation: leave the evaluation sets out, or score samples one by one"
    if args.eval_interval is not None and args.eval_function_path.startswith(FULLY_ASYNC):
        yield f"--eval-function-path {args.eval_function_path} does not evaluate; {BUILT_IN} does"
    if args.eval_interval is not None and args.eval_function_path.startswith(SFT_ROLLOUT) and not args.debug_train_only:
        yield (
            f"--eval-function-path {args.eval_function_path} asks no engine: it evaluates the loss under --debug-train-only; with "
            "engines give another one, or leave --eval-interval out"
        )
    yield from _media_keys("--multimodal-keys", args.multimodal_keys)
    for item in args.eval_datasets:
        named = where(args, item)
        yield from _numbers(item, named)
        yield from _reward(args, item, named)
        yield from _media_keys(f"{named} multimodal_keys", item.multimodal_keys)
        yield from _hooks(item, named)
    yield from _reads_media(args)


def _numbers(item: EvalDatasetConfig, named: str) -> Iterator[str]:
    for name, (low, is_open, high) in _NUMBERS.items():
        value = getattr(item, name)
        if value is None and name != "n_samples_per_eval_prompt":
            continue
        is_number = isinstance(value, int if name in _WHOLE else (int, float)) and not isinstance(value, bool)
        if (
            not is_number
            or value < low
            or (is_open and value == low)
            or value > high
            or (name == "top_k" and value == 0)
        ):
            kind = "a whole number" if name in _WHOLE else "a number"
            least = f"above {low:g}" if is_open else f"of at least {low:g}"
            most = "" if high == float("inf") else f", at most {high:g}"
            yield f"{named} {name} {value!r}: expected {kind} {least}{most}{', not 0' if name == 'top_k' else ''}"
            return
    if (
        item.min_new_tokens is not None
        and item.max_response_len is not None
        and item.min_new_tokens > item.max_response_len
    ):
        yield f"{named} min_new_tokens {item.min_new_tokens} is above max_response_len {item.max_response_len}"
    if (item.eval_early_stop_remaining is None) != (item.eval_early_stop_idle_timeout is None):
        yield f"{named} eval_early_stop_remaining and eval_early_stop_idle_timeout need each other"


def _reward(args: argparse.Namespace, item: EvalDatasetConfig, named: str) -> Iterator[str]:
    if item.rm_type is None or item.custom_rm_path:
        return
    if str(item.rm_type).removeprefix("boxed_") not in RM_TYPES:
        yield f"{named} rm_type {item.rm_type}: one of {', '.join(RM_TYPES)}, or one of them with the prefix boxed_"
    elif item.rm_type == "remote_rm" and not args.rm_url:
        yield f"{named} rm_type remote_rm needs --rm-url"


def _media_keys(named: str, keys: dict | None) -> Iterator[str]:
    if keys is None:
        return
    if not isinstance(keys, dict) or not all(kind in MEDIA and isinstance(key, str) for kind, key in keys.items()):
        yield f'{named} {keys!r}: expected an object from {", ".join(MEDIA)} to row keys, such as {{"image": "images"}}'


def _hooks(item: EvalDatasetConfig, named: str) -> Iterator[str]:
    for name in ("custom_rm_path", "custom_generate_function_path"):
        hook = getattr(item, name)
        parts = split_file_hook(hook) if hook else None
        if parts and not os.path.isfile(parts[0]):
            yield f"{named} {name} {hook}: no such file"


def _reads_media(args: argparse.Namespace) -> Iterator[str]:
    """The embedded engine has no model that looks at an image, so a generate function of the user has to."""
    if args.rollout_engine != "embedded" or args.debug_train_only or args.custom_generate_function_path:
        return
    text_only = "the embedded engine reads text only; give a custom generate function, or --rollout-engine sglang"
    if args.multimodal_keys and args.rollout_function_path.startswith((BUILT_IN, FULLY_ASYNC)):
        yield f"--multimodal-keys {args.multimodal_keys}: {text_only}"
    for item in args.eval_datasets if args.eval_function_path == BUILT_IN else ():
        if item.multimodal_keys and not args.multimodal_keys and not item.custom_generate_function_path:
            yield f"{where(args, item)} multimodal_keys {item.multimodal_keys}: {text_only}"
