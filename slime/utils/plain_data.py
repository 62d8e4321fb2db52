"""Values of samples as plain data for files, and back.

Invariant: `to_plain` gives None, bool, int, float, str, bytes, tensors and containers of them, so that it loads with
`torch.load(weights_only=True)`. Images come back as they were, pixel by pixel, and arrays do when asked for; buffers of bytes become
bytes; anything else becomes its text, which is said once per key and type. With one `Shared` for a file, an image, array or tensor
that the media of several samples hold is in it once, and one object again after reading. Does not know files.
"""

from __future__ import annotations

import copy
import enum
import functools
import hashlib
import io
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

MEDIA_FIELDS = frozenset({"prompt", "multimodal_inputs", "multimodal_train_inputs"})
"""Fields of a sample whose images, arrays and tensors nobody writes into, so that samples may share them."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_PLAIN_BASES = (bool, int, float, str, bytes)
_IMAGE, _ARRAY = "slime_image", "slime_array"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_MIN_SHARED_BYTES = 1024  # smaller ones are not worth a digest


class Shared:
    """What was converted for a file so far: the same object, or the same content, gives the same object again."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[Any, Any]] = {}  # the value too, so that its id stays taken
        self._by_content: dict[tuple, Any] = {}

    def once(self, value: Any, convert: Callable, content: Callable | None = None) -> Any:
        """`convert(value)`, called once per object; `content(value)` names what is in it, when equal ones may be one."""
        key = id(value)
        if key not in self._by_object:
            name = content(value) if content is not None else None
            found = self._by_content.get(name) if name is not None else None
            if found is None:
                found = convert(value)
                if name is not None:
                    self._by_content[name] = found
            self._by_object[key] = (value, found)
        return self._by_object[key][1]


def _once(shared: Shared | None, value: Any, convert: Callable, content: Callable | None = None) -> Any:
    return convert(value) if shared is None else shared.once(value, convert, content)


def to_plain(value: Any, exact: bool = False, shared: Shared | None = None, key: str = "") -> Any:
    """`value` made of plain types.

    Args:
        exact: arrays are marked, so that `from_plain` gives arrays again; otherwise they are tensors from now on.
        shared: of the file that the value goes into.
        key: where the value stands, for what is said about those without a plain form.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return to_plain(value.value, exact, shared, key)
    if isinstance(value, Mapping):
        return {
            to_plain(name, exact, shared, key): to_plain(item, exact, shared, _joined(key, name))
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        if type(value) is list and set(map(type, value)) <= _PLAIN:  # token lists are long
            return list(value)
        items = [to_plain(item, exact, shared, key) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return _from_library(value, exact, shared, key)


def _joined(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _from_library(value: Any, exact: bool, shared: Shared | None, key: str) -> Any:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return _once(shared, value, lambda tensor: tensor.detach().cpu(), _tensor_content)
    if isinstance(value, np.generic):
        return to_plain(value.item(), exact, shared, key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        plain = _once(shared, value, _plain_array, _array_content)
        return plain if exact else plain[_ARRAY]
    if isinstance(value, np.ndarray):
        items = to_plain(value.tolist(), exact, shared, key)
        return {_ARRAY: items} if exact and value.dtype.kind == "U" else items
    if is_image(value):
        return _once(shared, value, _plain_image, _image_content)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    for base in _PLAIN_BASES:
        if isinstance(value, base):
            return base(value)
    _say_text(key, type(value).__name__)
    return str(value)


@functools.lru_cache(maxsize=1024)
def _say_text(key: str, kind: str) -> None:
    logger.warning("%s: values of type %s have no form in files: checkpoints and dumps hold their text", key, kind)


def from_plain(value: Any, shared: Shared | None = None) -> Any:
    """What `to_plain` was given: images, and arrays that are marked, are themselves again. Containers are new ones.

    Args:
        shared: of the file that the value is from: what is one there is one here.
    """
    if isinstance(value, dict):
        if (_IMAGE in value and value.keys() <= {_IMAGE, "mode", "size"}) or (len(value) == 1 and _ARRAY in value):
            return _once(shared, value, _restored)
        return {key: from_plain(item, shared) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if type(value) is list and set(map(type, value)) <= _PLAIN:
            return list(value)
        items = [from_plain(item, shared) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _restored(value: dict[str, Any]) -> Any:
    if _IMAGE in value:
        return _image(**value)
    import numpy as np

    content = value[_ARRAY]
    return np.array(content, dtype=str) if isinstance(content, list) else content.numpy()


def without_plain_form(value: Any) -> str | None:
    """Where something stands that would not come back from a file, and its type; None when all would."""
    if type(value) in _PLAIN or isinstance(value, (*_PLAIN_BASES, enum.Enum, bytearray, memoryview, io.BytesIO)):
        return None
    if isinstance(value, Mapping):
        places = ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        places = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        return None if _has_plain_form(value) else f" is a {type(value).__module__}.{type(value).__name__}"
    return next((place + found for place, item in places if (found := without_plain_form(item))), None)


def _has_plain_form(value: Any) -> bool:
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufcU"
    return isinstance(value, (torch.Tensor, np.generic)) or is_image(value)


def with_shared_leaves(value: Any) -> Any:
    """A copy that has containers of its own and the same images, arrays and tensors."""
    if type(value) is dict:
        return {key: with_shared_leaves(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(with_shared_leaves, value))
    if is_image(value) or (hasattr(value, "shape") and hasattr(value, "dtype")):
        return value
    return value if type(value) in _PLAIN else copy.deepcopy(value)


def fields_to_plain(fields: Mapping, shared: Shared, exact: bool = True) -> dict[str, Any]:
    """The fields of a sample made of plain types. Media come back as they were; other arrays too if `exact`."""
    return {
        name: to_plain(value, True, shared, name) if name in MEDIA_FIELDS else to_plain(value, exact, None, name)
        for name, value in fields.items()
    }


def fields_from_plain(data: Mapping, shared: Shared) -> dict[str, Any]:
    """Inverse of `fields_to_plain`."""
    return {name: from_plain(value, shared if name in MEDIA_FIELDS else None) for name, value in data.items()}


def is_image(value: Any) -> bool:
    """Whether this is a PIL image; PIL is not loaded for the question."""
    image_module = sys.modules.get("PIL.Image")
    return image_module is not None and isinstance(value, image_module.Image)


# ---- contents ----


def _tensor_content(tensor: Any) -> tuple | None:
    import torch

    if tensor.layout is not torch.strided or tensor.nbytes < _MIN_SHARED_BYTES:
        return None
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return ("tensor", tensor.dtype, tuple(tensor.shape), _digest(plain.numpy()))


def _array_content(array: Any) -> tuple | None:
    import numpy as np

    if array.nbytes < _MIN_SHARED_BYTES:
        return None
    return ("array", array.dtype.str, array.shape, _digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def _image_content(image: Any) -> tuple:
    palette = image.getpalette() if image.mode in ("P", "PA") else None
    extra = repr((palette, image.info.get("transparency")))
    return ("image", image.mode, image.size, extra, _digest(image.tobytes()))


def _digest(content: Any) -> bytes:
    return hashlib.sha1(content, usedforsecurity=False).digest()


def _plain_array(array: Any) -> dict[str, Any]:
    import torch

    return {_ARRAY: torch.from_numpy(array.copy())}


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
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(item, right[key]) for key, item in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if hasattr(left, "shape"):
        return left.shape == right.shape and left.dtype == right.dtype and bool((left == right).all())
    return bool(left == right)
