"""An engine as the weight publisher sees it: an object with the control calls of `EngineClient`."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from slime.utils import tensor_wire
from slime.utils.engine_client import EngineError


class FakeEngine:
    """Records the calls and keeps what it was sent, like an engine that applies a bucket, or a folder, or nothing of it.

    fail_at: the first call that it refuses.
    """

    def __init__(self, base_url: str = "http://engine", fail_at: str | None = None):
        self.base_url, self.fail_at = base_url, fail_at
        self.calls: list[str] = []
        self.held: dict[str, torch.Tensor] = {}
        self.version: str | None = None
        self.is_open = self.is_paused = False

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_at:
            self.fail_at = None
            raise RuntimeError(f"{self.base_url} failed at {name}")

    def pause(self, mode):
        self.is_paused = True
        self._note("pause")

    def flush_cache(self, deadline_s):
        self._note("flush")

    def begin_weight_update(self):
        if self.is_open:
            raise RuntimeError("a window is already open")  # what SGLang answers
        self.is_open = True
        self._note("begin")

    def end_weight_update(self, timeout_s=None):
        if not self.is_open:
            raise EngineError("no window is open", 400)
        self.is_open = False
        self._note("end")

    def continue_generation(self, timeout_s=None):
        self.is_paused = False
        self._note("continue")

    def weight_version(self):
        self._note("version")
        return self.version

    def update_weights_from_tensor(self, serialized, load_format, weight_version):
        pairs = tensor_wire.named_tensors_of(tensor_wire.deserialize(serialized[0]), load_format)
        copies = {name: tensor.clone() for name, tensor in pairs}
        self._note("update")
        self.held |= copies
        self.version = weight_version

    def update_weights_from_disk(self, path, weight_version):
        self._note("update")
        self.held, self.version = load_file(f"{path}/model.safetensors"), weight_version
