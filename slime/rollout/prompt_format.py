"""How prompts of the rollout and of evaluation sets are read, given the flags; the prompt set of a run.

A message list stays a list when the generate hook has the list form (it edits conversations); the built-in generator
renders lists itself.
"""

from __future__ import annotations

import os
from dataclasses import replace

from slime.utils.data import PromptSet, RowFormat
from slime.utils.hook_forms import generate_form
from slime.utils.misc import load_hook
from slime.utils.streaming_data import StreamingPrompts


def rollout_row_format(args) -> RowFormat:
    """The row format of `--prompt-data`."""
    fmt = RowFormat.from_args(args)
    if uses_list_generate(args.custom_generate_function_path):
        fmt = replace(fmt, apply_chat_template=False)
    return fmt


def uses_list_generate(path: str | None) -> bool:
    """Whether the generate hook at `path` takes a list of samples."""
    return path is not None and generate_form(load_hook(path, "custom_generate_function_path")) == "list"


def load_prompts(args) -> PromptSet | StreamingPrompts | None:
    """The prompts of `--prompt-data`; None when the data source brings its own.

    Raises:
        ValueError: no usable prompt, or flags that exclude each other. FileNotFoundError: no such file.
    """
    if not args.rollout_global_dataset or not args.prompt_data:
        return None
    if args.streaming_data and args.rollout_shuffle:
        raise ValueError("--rollout-shuffle needs all rows: it cannot be combined with --streaming-data")
    from slime.utils.processing_utils import load_processor, load_tokenizer

    tokenizer = processor = None
    fmt = rollout_row_format(args)
    if args.hf_checkpoint:
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        processor = load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        if args.dump_details:
            tokenizer.save_pretrained(os.path.join(args.dump_details, "tokenizer"))
            if processor is not None:
                processor.save_pretrained(os.path.join(args.dump_details, "processor"))
    if args.streaming_data:
        return StreamingPrompts(args.prompt_data, fmt, tokenizer, processor)
    prompts = PromptSet(args.prompt_data, fmt, tokenizer, processor, num_workers=args.num_data_workers)
    prompts.seed = args.rollout_seed
    return prompts
