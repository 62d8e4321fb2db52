"""Where the weights of an engine stay while its memory is released.

Beside an accelerator that is host memory. Without one the weights already are in host memory, so they go to an unlinked
temporary file (TMPDIR): only then is their memory free for the trainer. Invariant: what comes back has the same bits.
"""

from __future__ import annotations

import tempfile

import torch

from slime.utils import device


class WeightStash:
    """Contents of `tensors`, kept aside; the caller drops its own references afterwards."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._place = next(iter(tensors.values())).device
        self._shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        self._host: dict[str, torch.Tensor] = {}
        self._file = None
        if device.has_accelerator():
            self._host = {key: tensor.cpu() for key, tensor in tensors.items()}
            return
        self._file = tempfile.TemporaryFile(prefix="slime-weights-", buffering=0)
        try:
            for tensor in tensors.values():
                _write(self._file, tensor)
        except OSError as error:
            self._file.close()
            raise RuntimeError(
                f"no room for the weights in {tempfile.gettempdir()} ({error}): set TMPDIR to a folder with more space"
            ) from error

    def restore(self) -> dict[str, torch.Tensor]:
        """Return the tensors where they were; the stash is empty afterwards."""
        if self._file is None:
            restored = {key: tensor.to(self._place) for key, tensor in self._host.items()}
            self._host = {}
            return restored
        self._file.seek(0)
        restored = {}
        for key, (shape, dtype) in self._shapes.items():
            restored[key] = torch.empty(shape, dtype=dtype)
            _read(self._file, restored[key])
        self._file.close()
        return restored


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _write(file, tensor: torch.Tensor) -> None:
    left = _bytes_of(tensor)
    while left:
        left = left[file.write(left) :]


def _read(file, tensor: torch.Tensor) -> None:
    left = _bytes_of(tensor)
    while left:
        count = file.readinto(left)
        if not count:
            raise RuntimeError("the file of released weights is shorter than what was written")
        left = left[count:]
