"""Safetensors files: written with the mode that the umask asks for, opened with errors that name the file.

The library writes through a private temporary file, so that its files are readable by their owner alone; model folders
are meant to be shared. Knows nothing about what the tensors are.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any


def write_safetensors(tensors: dict, path: str | Path) -> None:
    """Write `tensors` to `path` like any other new file: readable by whom the umask allows."""
    from safetensors.torch import save_file

    path = Path(path)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def open_safetensors(path: str | Path) -> Any:
    """Open a file for reading tensor by tensor.

    Raises: ValueError when it is absent, cut off or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); copy or download it again") from error
