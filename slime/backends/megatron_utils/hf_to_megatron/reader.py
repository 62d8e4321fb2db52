"""Read tensors of a Hugging Face folder (safetensors, single or sharded) one by one.

Pickled weights (`*.bin`) are refused: loading them can run code. Invariant: a tensor is read from disk when asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from slime.utils.weight_file import open_safetensors


class HfCheckpoint:
    """The tensors of a folder by name.

    Raises: ValueError when the folder has no safetensors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files = self._map_names()
        self._open: dict[str, object] = {}

    def _map_names(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            pickled = sorted(p.name for p in self.folder.glob("*.bin"))
            hint = f"; {pickled[0]} is pickled and is not loaded, convert it to safetensors" if pickled else ""
            raise ValueError(f"no *.safetensors in the Hugging Face checkpoint {self.folder}{hint}")
        names = {}
        for file in files:
            with open_safetensors(file) as handle:
                names.update(dict.fromkeys(handle.keys(), file.name))
        return names

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU.

        Raises: ValueError when the folder lacks it.
        """
        if name not in self._files:
            raise ValueError(f"tensor {name!r} is missing from the Hugging Face checkpoint {self.folder}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = open_safetensors(self.folder / file)
        return self._open[file].get_tensor(name)
