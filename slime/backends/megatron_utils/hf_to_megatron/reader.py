"""Read tensors of a Hugging Face folder (safetensors, single or sharded) one by one.

Pickled weights (`*.bin`) are refused: loading them can run code. Invariant: a tensor is read from disk when asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from slime.utils.quantization import Scheme, scheme_of
from slime.utils.weight_file import open_safetensors


class HfCheckpoint:
    """The tensors of a folder by name.

    Raises: ValueError when the folder has no safetensors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files = self._map_names()
        self._open: dict[str, object] = {}
        self._scheme = self._read_scheme()

    def _read_scheme(self) -> Scheme | None:
        config = self.folder / "config.json"
        found = json.loads(config.read_text()).get("quantization_config") if config.is_file() else None
        return scheme_of(found, str(self.folder))

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
        """Return the names of all tensors; a quantised weight counts as one."""
        names = set(self._files)
        for name in list(names) if self._scheme is not None else ():
            weight = name[: name.find(".weight") + len(".weight")]
            if name != weight and self._scheme.covers(weight) and name in self._scheme.part_names(weight):
                names.discard(name)
                names.add(weight)
        return names

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU; a quantised weight as float32.

        Raises: ValueError when the folder lacks it.
        """
        if self._scheme is not None and self._scheme.covers(name):
            parts = self._scheme.part_names(name)
            if parts[-1] in self._files:
                return self._scheme.dequantize(name, {part: self._stored(part) for part in parts})
        return self._stored(name)

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ValueError(f"tensor {name!r} is missing from the Hugging Face checkpoint {self.folder}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = open_safetensors(self.folder / file)
        return self._open[file].get_tensor(name)
