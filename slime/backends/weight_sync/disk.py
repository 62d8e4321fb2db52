"""Weights as whole checkpoints on a disk that trainer and engines see: one Hugging Face folder a version, `weight_v000012`.

Invariants: a folder has its name only when everything in it is written, and whoever writes a version anew replaces it; it goes when
every engine holds what is in it. What did not get that far stays, since an engine may still be reading, but for what never had its
name: whoever writes next removes it. It does not write: the model's export does. One run at a time uses a
`--update-weight-disk-dir`.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.utils.engine_client import EngineClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VersionFolder:
    """The weights of one version."""

    path: str
    version: int

    def load_into(self, client: EngineClient) -> None:
        """Have an engine read the folder, which it must see under the same path."""
        client.update_weights_from_disk(self.path, weight_version=str(self.version))

    def num_bytes(self) -> int:
        """Size of the weights in it."""
        return sum(file.stat().st_size for file in Path(self.path).glob("*.safetensors"))

    def remove(self) -> None:
        """Delete it; what a file system does not let go is only said, the engines have what they need."""
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            logger.warning("%s, which all engines have read, could not be removed: %s", self.path, error)


def remove_unfinished(args) -> None:
    """Delete what a write that was cut short has left under the names that the export gives before a folder has its own."""
    for pattern in (".weight_v*.incomplete", ".weight_v*.old"):
        for path in Path(args.update_weight_disk_dir).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def version_folder(args, version: int) -> VersionFolder:
    """Return where `version` is written and read."""
    return VersionFolder(f"{args.update_weight_disk_dir}/weight_v{version:06d}", version)
