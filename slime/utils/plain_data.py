"""Values of samples as plain data for files, and back.

Invariant: `to_plain` gives None, bool, int, float, str, bytes, tensors and containers of them, so that it loads with
`torch.load(weights_only=True)`. Images come back as they were, pixel by pixel, and arrays do when asked for; buffers of bytes become
bytes, anything else that has no plain form becomes its text. Does not know samples or files.
"""

from __future__ import annotations

import enum
import io
import sys
from collections.abc import Mapping
from typing import Any

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_IMAGE, _ARRAY = "slime_image", "slime_array"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def to_plain(value: Any, exact: bool = False) -> Any:
    """`value` made of plain types.

    Args:
        exact: arrays are marked, so that `from_plain` gives arrays again; otherwise they are tensors from now on.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return to_plain(value.value, exact)
    if isinstance(value, Mapping):
        return {to_plain(key, exact): to_plain(item, exact) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        if type(value) is list and set(map(type, value)) <= _PLAIN:  # token lists are long
            return list(value)
        items = [to_plain(item, exact) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return _from_library(value, exact)


def _from_library(value: Any, exact: bool) -> Any:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.generic):
        return to_plain(value.item(), exact)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(value.copy())
        return {_ARRAY: tensor} if exact else tensor
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist(), exact)
    if is_image(value):
        return _plain_image(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return value.getvalue() if isinstance(value, io.BytesIO) else str(value)


def from_plain(value: Any) -> Any:
    """What `to_plain` was given: images, and arrays that are marked, are themselves again. Containers are new ones."""
    if isinstance(value, dict):
        if _IMAGE in value and value.keys() <= {_IMAGE, "mode", "size"}:
            return _image(**value)
        if len(value) == 1 and _ARRAY in value:
            return value[_ARRAY].numpy()
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if type(value) is list and set(map(type, value)) <= _PLAIN:
            return list(value)
        items = [from_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def is_image(value: Any) -> bool:
    """Whether this is a PIL image; PIL is not loaded for the question."""
    image_module = sys.modules.get("PIL.Image")
    return image_module is not None and isinstance(value, image_module.Image)


def _plain_image(image: Any) -> dict[str, Any]:
    """PNG where it holds the mode exactly, else the pixels as they are in memory."""
    import torch

    image = image.convert("RGBA") if image.mode == "PA" else image  # its palette is not among its pixels
    if image.mode not in _PNG_MODES:
        raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return {_IMAGE: raw, "mode": image.mode, "size": tuple(image.size)}
    stream = io.BytesIO()
    image.save(stream, format="PNG", compress_level=1)
    return {_IMAGE: torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)}


def _image(slime_image: Any, mode: str | None = None, size: tuple[int, int] | None = None) -> Any:
    from PIL import Image

    content = slime_image.numpy().tobytes()
    if mode is not None:
        return Image.frombytes(mode, size, content)
    image = Image.open(io.BytesIO(content))
    image.load()
    return image.copy()  # a plain image, without the file it came from


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal, tensors, arrays and images element by element."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(item, right[key]) for key, item in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if hasattr(left, "shape"):
        return left.shape == right.shape and left.dtype == right.dtype and bool((left == right).all())
    return bool(left == right)
