"""What must hold between the flags of the weight sync."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

from slime.config.registry import spelling

_SOURCES = ("hf_checkpoint", "load", "ref_load", "opd_teacher_load")


def problems(args: argparse.Namespace, given: set[str]) -> Iterator[str]:
    """Give what stands against sending weights through a folder."""
    if args.update_weight_transport != "disk":
        return
    if args.lora_sync == "adapter":
        yield "--update-weight-transport disk cannot be used with --lora-sync adapter: its folders are whole models"
    folder = args.update_weight_disk_dir
    if folder is None:
        yield "--update-weight-transport disk needs --update-weight-disk-dir, a folder that trainer and engines see"
        return
    for dest in _SOURCES:
        path = getattr(args, dest)
        if path is not None and _is_version(path, folder):
            yield (
                f"{spelling(dest)} {path} is a version folder of --update-weight-disk-dir {folder}, which this run would "
                "replace: move it, or name another folder"
            )


def _is_version(path: str, folder: str) -> bool:
    below = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return re.fullmatch(r"weight_v\d+", below.split(os.sep)[0]) is not None
