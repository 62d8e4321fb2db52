"""Flags that were given but change nothing, because the one that reads them is not given: said at start, never an error.

One table for flags that need another; it runs last, when everything else is derived. It changes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from slime.config.registry import by_dest, spelling

#: What is missing, where it is there, and which flags nothing reads without it (a name that ends in _ is a prefix).
_NEEDS: tuple[tuple[str, Callable[[argparse.Namespace], bool], tuple[str, ...]], ...] = (
    ("--use-kl-loss", lambda args: args.use_kl_loss, ("kl_loss_coef",)),
    ("--partial-rollout", lambda args: args.partial_rollout, ("mask_offpolicy_in_partial_rollout",)),
    ("--use-dynamic-batch-size", lambda args: args.use_dynamic_batch_size, ("max_tokens_per_gpu",)),
    ("--use-tis", lambda args: args.use_tis or args.custom_tis_function_path, ("tis_clip", "tis_clip_low")),
    ("--use-tis", lambda args: args.use_tis or args.get_mismatch_metrics, ("custom_tis_function_path",)),
    ("--use-opsm", lambda args: args.use_opsm, ("opsm_delta",)),
    ("--loss-type custom_loss", lambda args: args.loss_type == "custom_loss", ("custom_loss_function_path",)),
    ("--save or --save-interval", lambda args: args.save is not None, ("async_save",)),
    (
        "--update-weight-transport disk",
        lambda args: args.update_weight_transport == "disk",
        ("update_weight_disk_dir", "update_weight_disk_keep_files", "custom_update_weight_post_write_path"),
    ),
    ("--use-wandb", lambda args: args.use_wandb, ("wandb_",)),
)


def note_unused(run) -> None:
    """Add a note for each row of the table that left given flags without a reader, and for what other flags replace."""
    args = run.args
    for needed, is_there, names in _NEEDS:
        unused = [] if is_there(args) else [spelling(dest) for dest in sorted(run.given) if _is_one(args, dest, names)]
        if unused:
            run.notes.append(f"{', '.join(unused)}: no effect without {needed}")
    if args.num_data_workers and args.streaming_data:
        run.notes.append(
            f"--num-data-workers {args.num_data_workers} has no effect with --streaming-data: rows are read as needed"
        )
    if args.spec and args.custom_model_provider_path:
        run.notes.append(f"--spec {' '.join(args.spec)} is left to the function of --custom-model-provider-path")
    if args.rm_type and args.custom_rm_path:
        run.notes.append(
            f"--rm-type {args.rm_type} is left to the function of --custom-rm-path, which gives the rewards"
        )
    for item in args.eval_datasets:
        if item.rm_type and item.custom_rm_path:
            run.notes.append(f"evaluation set {item.name}: rm_type {item.rm_type} is left to {item.custom_rm_path}")


def _is_one(args: argparse.Namespace, dest: str, names: tuple[str, ...]) -> bool:
    """Say whether a given flag is of these names and was given something else than its default."""
    if not (dest in names or any(name.endswith("_") and dest.startswith(name) for name in names)):
        return False
    flags = by_dest().get(dest)
    return flags is None or getattr(args, dest) != flags[0].default
