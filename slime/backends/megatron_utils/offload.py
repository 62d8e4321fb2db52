"""What a training rank gives back while it sleeps, and how it takes it again.

Gradient buffers are freed on every machine: the next step zeroes them anyway. Beside an accelerator weights, optimizer state and
fp32 copies move to host memory; on a CPU that is where they are, so they stay. Views stay valid: storages are emptied and
filled again in place. Process groups stay connected. Does not know when to sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from slime.backends.megatron_utils import optimizer_fixes
from slime.utils import device


class Offload:
    """Sleep and wake of one model (list of wrapped chunks) and its optimizer (None when the run trains nothing)."""

    def __init__(self, model: list, optimizer):
        self._model, self._optimizer = model, optimizer
        self._weights, self._state = ParkedStorages(), ParkedStorages()
        self.is_asleep = False

    def sleep(self) -> None:
        """Give back what is not needed to keep; doing it twice is harmless."""
        if self.is_asleep:
            return
        device.synchronize()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        for chunk in self._model:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self._weights.park(on_accelerator(self._weight_tensors()))
        self._state.park(on_accelerator(self._state_tensors()))
        device.synchronize()
        device.empty_cache()
        self.is_asleep = True

    def wake(self) -> None:
        """Take everything back; gradients are zero. Doing it twice is harmless."""
        if not self.is_asleep:
            return
        self.unpark_weights()
        self._state.unpark()
        for chunk in self._model:
            chunk.restore_grad_buffers(synchronize=False)
        device.synchronize()
        self.is_asleep = False

    def unpark_weights(self) -> None:
        """Bring only the weights back, for an export while asleep."""
        self._weights.unpark()

    def park_weights(self) -> None:
        """Undo `unpark_weights`."""
        self._weights.park(on_accelerator(self._weight_tensors()))
        device.empty_cache()

    def grad_bytes(self) -> int:
        """Return the memory that gradient buffers hold now."""
        buffers = [buffer for chunk in self._model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._model:
            yield from (parameter.data for parameter in chunk.parameters())

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        """Moments, and the optimizer's own parameters (fp32 copies, or views of the weights, which are parked already)."""
        for part in optimizer_fixes.parts(self._optimizer) if self._optimizer is not None else ():
            for group in part.optimizer.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))


class ParkedStorages:
    """Storages whose contents lie in host memory while they themselves are empty."""

    def __init__(self):
        self._parked: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages behind `tensors` to the host and empty them; empty ones are left out."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            contents = _bytes_of(storage)
            host = torch.empty(contents.shape, dtype=torch.uint8, pin_memory=device.pin_host_memory())
            host.copy_(contents)
            storage.resize_(0)
            self._parked.append((storage, host))

    def unpark(self) -> None:
        """Fill the storages again."""
        for storage, host in self._parked:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)
        self._parked = []


def on_accelerator(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that are not in host memory."""
    return (tensor for tensor in tensors if tensor.device.type != "cpu")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
