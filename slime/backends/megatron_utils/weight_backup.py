"""Host copies of the model's weights by tag, and the switch between them in place.

Of a model with low-rank adapters only those are kept: the base never changes, and its own tag is adapters that add nothing.
Tags: `actor` (the weights in training; a critic's too), those of `roles.py` for the others. Invariants: a restore gives the
same bits back; the optimizer's own copies are not touched, so whoever trains must have `actor` in place. A switch to the
tag that is live already costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from slime.backends.megatron_utils.lora import trained_parameters
from slime.utils import device


class WeightBackup:
    """Backups of one model (list of wrapped chunks)."""

    def __init__(self, model: list):
        self.model = model
        self._copies: dict[str, list[torch.Tensor]] = {}
        self.live = "actor"

    def _tensors(self) -> list[torch.Tensor]:
        found = []
        for chunk in self.model:
            found += [p.data for p in trained_parameters(chunk)]
            found += [b for name, b in chunk.named_buffers() if "expert_bias" in name]
        return found

    def tags(self) -> set[str]:
        """Return the tags that can be switched to."""
        return set(self._copies)

    @torch.no_grad()
    def store(self, tag: str) -> None:
        """Copy the live weights to the host under `tag`."""
        live = self._tensors()
        if tag not in self._copies:
            self._copies[tag] = [torch.empty_like(t, device="cpu", pin_memory=device.pin_host_memory()) for t in live]
        for copy, tensor in zip(self._copies[tag], live, strict=True):
            copy.copy_(tensor, non_blocking=True)
        device.synchronize()

    def drop(self, keep: Callable[[str], bool]) -> None:
        """Forget the copies whose tag is not kept."""
        self._copies = {tag: copy for tag, copy in self._copies.items() if keep(tag)}

    @contextmanager
    def filling(self, tag: str) -> Iterator[None]:
        """Store what the block puts into the live weights under `tag`; the trained ones are in place again afterwards."""
        self.store("actor")
        yield
        self.store(tag)
        self.live = tag
        self.switch("actor")

    @torch.no_grad()
    def switch(self, tag: str) -> None:
        """Put the weights stored under `tag` in place, storing the trained ones first if they are live."""
        if tag == self.live:
            return
        assert tag in self._copies, f"no weights are stored under {tag!r}, only {sorted(self._copies)}"
        if self.live == "actor":
            self.store("actor")
        for copy, tensor in zip(self._copies[tag], self._tensors(), strict=True):
            tensor.copy_(copy, non_blocking=True)
        device.synchronize()
        self.live = tag
