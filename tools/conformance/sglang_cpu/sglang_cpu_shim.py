"""Lets an unchanged SGLang run on a CPU without triton, sgl_kernel and a CPU build of torchvision.

Copied into the site-packages of the environment that SGLang lives in and installed by `sglang_cpu.pth` at every start of
its interpreter, so that SGLang's own subprocesses have it too. Does nothing unless SGLANG_USE_CPU_ENGINE is 1.
Standard library only until SGLang or torchvision are imported.
"""

from __future__ import annotations

import os
import sys
import types

_kept: list = []  # torch forgets operators whose library object is gone


class _Finder:
    """Finds nothing; prepares the ground just before the two packages are imported."""

    def __init__(self) -> None:
        self._prepared: set[str] = set()

    def find_spec(self, name, path=None, target=None):
        if name not in ("torchvision.extension", "sglang") or name in self._prepared:
            return
        self._prepared.add(name)
        if name == "sglang":
            _install_triton_stub()
            _define_kernel_operators()
        else:
            _define_torchvision_operators()


def install() -> None:
    """Put the finder first; a no-op in other environments, and the second time (lib64 may be another name of lib)."""
    is_there = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and not is_there:
        sys.meta_path.insert(0, _Finder())


def _define_torchvision_operators() -> None:
    """torchvision's compiled operators do not load beside a CPU torch; transformers only wants them to exist."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _define_kernel_operators() -> None:
    """Compiled kernels that SGLang's Qwen-VL modules look up while they are imported; Qwen2-VL never calls them."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in (
        "sigmoid_mul",
        "qk_gemma_rmsnorm",
        "qk_gemma_rmsnorm_with_gate",
        "qkvzba_split_reshape_cat_contiguous",
    ):
        library.define(f"fused_{name}_cpu(Tensor input) -> Tensor")
    _kept.append(library)


def _install_triton_stub() -> None:
    """Use the triton stub that SGLang ships for macOS, by showing that one module a machine it was written for."""
    import torch

    stubs = _load_platform_stubs()
    stubs.sys = types.SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path)
    stubs.platform = types.SimpleNamespace(machine=lambda: "arm64")
    stubs._patch_non_blocking = lambda: None
    is_available, names = torch.backends.mps.is_available, set(dir(torch.mps))
    torch.backends.mps.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        torch.backends.mps.is_available = is_available
    for name in set(dir(torch.mps)) - names:
        delattr(torch.mps, name)


def _load_platform_stubs():
    import importlib.util

    folders = (os.path.join(folder, "sglang") for folder in sys.path)
    path = next(p for p in (os.path.join(f, "_platform_stubs.py") for f in folders) if os.path.exists(p))
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
