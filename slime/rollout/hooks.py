"""Resolving every hook flag of the rollout side at start, so that a wrong path or signature fails before engines run.

Afterwards each flag that named a `file.py` names `/abs/file.py:attribute`, so that `load_function` finds the same object in
this process. The hooks of evaluation sets are looked at as well.
"""

from __future__ import annotations

from slime.utils.hook_calls import check_hooks
from slime.utils.hook_table import ROLLOUT_HOOKS


def check_rollout_hooks(args) -> None:
    """Load every hook of the rollout side and check that it can be called as it will be.

    Raises: ValueError naming the flag (or the evaluation set), the path, and what was found instead.
    """
    check_hooks(args, list(ROLLOUT_HOOKS))
    for dataset in args.eval_datasets:
        try:
            check_hooks(dataset, ["custom_rm_path", "custom_generate_function_path"])
        except ValueError as error:
            raise ValueError(f"evaluation set {dataset.name}: {error}") from error
