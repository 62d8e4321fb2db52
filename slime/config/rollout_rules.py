"""What stands against the rounds of a run: sizes, sources of prompts, rewards, rollout functions and dumps, and what they need.

Checks read; of files they look at names alone. What a function or data source of the user's does without is left to it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from slime.config.checkpoint_dirs import done_before
from slime.config.eval_rules import BUILT_IN, FULLY_ASYNC, SFT_ROLLOUT
from slime.config.model_shape import text_part
from slime.config.rollout import RM_TYPES

DEFAULT_DATA_SOURCE = "slime.rollout.data_source."
FORGE_LOAD = "slime.rollout.forge_load."

Problems = Iterator[str]


def problems(args: argparse.Namespace, given: set[str]) -> Problems:
    """Give every problem of generating the rounds, or of reading them from dumps."""
    yield from _sizes(args)
    yield from _prompts(args)
    yield from _rewards(args)
    yield from _function(args)
    yield from _dumps(args)


def _sizes(args) -> Problems:
    """Of a round and of a sample."""
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below "
            f"--rollout-batch-size {args.rollout_batch_size}"
        )
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        yield (
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len} leaves no room for a response in "
            f"--rollout-max-context-len {args.rollout_max_context_len}"
        )
    engines_generate = not args.debug_train_only and args.num_rollout != 0
    is_built_in = (
        args.rollout_function_path.startswith((BUILT_IN, FULLY_ASYNC)) and not args.custom_generate_function_path
    )
    limits = (
        args.rollout_max_response_len,
        args.rollout_max_context_len,
        args.sglang_context_length,
        args.model_arch.get("max_position_embeddings"),
        text_part(args.model_arch).get("max_position_embeddings"),
    )
    if engines_generate and is_built_in and not any(limits):
        yield "--rollout-max-response-len is missing: without it and --rollout-max-context-len a response has no limit"


def _prompts(args) -> Problems:
    """Where they come from, and how many rounds they are for."""
    if args.num_rollout is None and not args.rollout_global_dataset:
        yield "--disable-rollout-global-dataset needs --num-rollout: without a data set an epoch has no length"
    if args.streaming_data and args.num_rollout is None:
        yield "--streaming-data needs --num-rollout: a file that is read lazily has no known length"
    uses_data = args.rollout_global_dataset and args.data_source_path.startswith(DEFAULT_DATA_SOURCE)
    if uses_data and args.prompt_data is None and not args.load_debug_rollout_data and args.num_rollout != 0:
        yield "--prompt-data is missing: a .jsonl or .parquet file of prompts"
    if args.load_debug_rollout_data and args.num_rollout is None and args.prompt_data is None:
        yield "--load-debug-rollout-data needs --num-rollout: how many dumps to train on"
    if uses_data and args.prompt_data and args.streaming_data and args.rollout_shuffle:
        yield "--streaming-data and --rollout-shuffle exclude each other: shuffling needs all rows"


def _rewards(args) -> Problems:
    """What types of rewards need."""
    if args.rm_type and not args.custom_rm_path and args.rm_type.removeprefix("boxed_") not in RM_TYPES:
        yield f"--rm-type {args.rm_type}: one of {', '.join(RM_TYPES)}, or one of them with the prefix boxed_"
    if args.rm_type == "remote_rm" and not args.rm_url:
        yield "--rm-type remote_rm needs --rm-url"
    if args.rm_type == "reward_model" and not (args.rm_url or args.rm_model_path):
        yield "--rm-type reward_model needs --rm-model-path, or --rm-url of an engine that serves the model"
    takes_dicts = args.reward_key or args.custom_rm_path or args.custom_reward_post_process_path
    if args.rm_type in ("dapo", "boxed_dapo") and not takes_dicts:
        yield f"--rm-type {args.rm_type} gives score, acc and pred: --reward-key score says which to train on"


def _function(args) -> Problems:
    """What the rollout functions of ours need."""
    path = args.rollout_function_path
    if args.load_debug_rollout_data or args.num_rollout == 0:
        return
    is_ours = path == BUILT_IN and args.data_source_path.startswith("slime.") and not args.debug_train_only
    if is_ours and not args.rollout_global_dataset and args.prompt_data:
        yield (
            f"--disable-rollout-global-dataset leaves --prompt-data {args.prompt_data} to a data source of yours "
            "(--data-source-path), and there is none: leave out one of the two flags"
        )
    if path.startswith(SFT_ROLLOUT) and args.n_samples_per_prompt != 1:
        yield f"--n-samples-per-prompt {args.n_samples_per_prompt}: {path} makes one sample of a row, so it needs 1"


def _dumps(args) -> Problems:
    """Rounds that are read from files."""
    functions = (args.rollout_function_path, args.eval_function_path)
    forge = next((path for path in functions if path.startswith(FORGE_LOAD)), None)
    if args.load_forge_rollout_data and forge is None:
        yield f"--load-forge-rollout-data needs --rollout-function-path {FORGE_LOAD}generate_rollout, which reads it"
    first = done_before(args)[0]
    if args.num_rollout is not None and first >= args.num_rollout:
        return
    if forge is not None and not args.load_forge_rollout_data:
        yield f"--rollout-function-path {forge} needs --load-forge-rollout-data: a dump, or a path with {{rollout_id}}"
    forge_rounds = args.load_forge_rollout_data if args.rollout_function_path.startswith(FORGE_LOAD) else None
    for flag, template, names in (
        ("--load-debug-rollout-data", args.load_debug_rollout_data, [first]),
        ("--load-forge-rollout-data", forge_rounds, [first, 0]),
    ):
        if template and not any(map(os.path.exists, _filled(template, names))):
            yield f"{flag} {template}: no dump for round {first}"


def _filled(template: str, names: list[int]) -> list[str]:
    """The paths of these rounds; of a template that cannot be filled in, which has a check of its own, a path that exists."""
    try:
        return [template.format(rollout_id=name) for name in names]
    except (KeyError, IndexError, ValueError, AttributeError):
        return ["/"]
