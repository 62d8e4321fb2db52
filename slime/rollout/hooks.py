"""Resolving every hook flag at start, so that a wrong path fails before engines run.

Invariant: after `check_hooks` each hook flag that named a `file.py` names `/abs/file.py:attribute`, so that
`load_function` finds the same object in this process. Knows the flags by the suffix of their names.
"""

from __future__ import annotations

from slime.utils.hook_forms import generate_form
from slime.utils.misc import load_hook, spell_out_hooks

HOOK_OPTIONS = (
    "rollout_function_path",
    "eval_function_path",
    "custom_generate_function_path",
    "rollout_sample_hook_path",
    "custom_rm_path",
    "dynamic_sampling_filter_path",
    "round_policy_path",
    "buffer_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "data_source_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)


def check_hooks(args) -> None:
    """Load every hook of the rollout side.

    Raises:
        ImportError, AttributeError, ValueError: names the flag, the path, and what was found instead.
    """
    spell_out_hooks(args, HOOK_OPTIONS)
    for dataset in args.eval_datasets:
        spell_out_hooks(dataset, ("custom_rm_path", "custom_generate_function_path"))
    if args.custom_generate_function_path:
        generate_form(load_hook(args.custom_generate_function_path, "custom_generate_function_path"))
