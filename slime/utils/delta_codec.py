"""Byte-level differences between two versions of a tensor: the payload of a delta weight update.

Two encodings, both blind to the dtype. `xor`: new ^ old, as long as the tensor. `overwrite`: a little-endian u32 count, that
many u32 byte positions, then the new byte at each of them; short when few bytes change. Compression, checksums of files and
versions are the caller's.
"""

from __future__ import annotations

import zlib

import numpy as np

ENCODINGS = ("xor", "overwrite")
_MAX_POSITIONS = 2**32


def encode(old: bytes, new: bytes, encoding: str) -> bytes:
    """Return the payload that turns `old` into `new`.

    Raises:
        ValueError: unknown encoding, different sizes, or a tensor too large for the positions of `overwrite`.

    >>> encode(bytes([0, 1, 2]), bytes([0, 9, 2]), "overwrite").hex()
    '010000000100000009'
    """
    before, after = _arrays(old, new, encoding)
    if encoding == "xor":
        return (before ^ after).tobytes()
    if len(before) > _MAX_POSITIONS:
        raise ValueError(f"delta encoding overwrite addresses 4 GiB; the tensor has {len(before)} bytes: use xor")
    places = np.flatnonzero(before != after)
    return np.uint32(len(places)).astype("<u4").tobytes() + places.astype("<u4").tobytes() + after[places].tobytes()


def decode(old: bytes, payload: bytes, encoding: str) -> bytes:
    """Return the new bytes; the inverse of `encode`.

    Raises:
        ValueError: unknown encoding, or a payload that does not fit the old bytes.
    """
    if encoding == "xor":
        before, change = _arrays(old, payload, encoding)
        return (before ^ change).tobytes()
    _check(encoding)
    after = np.frombuffer(old, dtype=np.uint8).copy()
    count = int(np.frombuffer(payload[:4], dtype="<u4")[0]) if len(payload) >= 4 else -1
    if count < 0 or len(payload) != 4 + 5 * count:
        raise ValueError(f"delta payload of {len(payload)} bytes does not hold the {count} changes that it announces")
    places = np.frombuffer(payload, dtype="<u4", count=count, offset=4)
    if count and int(places.max()) >= len(after):
        raise ValueError(f"delta payload writes byte {int(places.max())} of a tensor of {len(after)} bytes")
    after[places] = np.frombuffer(payload, dtype=np.uint8, offset=4 + 4 * count)
    return after.tobytes()


def changed_bytes(old: bytes, new: bytes) -> int:
    """Return how many bytes differ."""
    before, after = _arrays(old, new, "xor")
    return int((before != after).sum())


def adler32(data: bytes) -> str:
    """Return the Adler-32 checksum as 8 hex digits."""
    return f"{zlib.adler32(data) & 0xFFFFFFFF:08x}"


def _arrays(old: bytes, new: bytes, encoding: str) -> tuple[np.ndarray, np.ndarray]:
    _check(encoding)
    if len(old) != len(new):
        raise ValueError(f"delta of tensors of different size: {len(old)} and {len(new)} bytes")
    return np.frombuffer(old, dtype=np.uint8), np.frombuffer(new, dtype=np.uint8)


def _check(encoding: str) -> None:
    if encoding not in ENCODINGS:
        raise ValueError(
            f"--update-weight-delta-encoding {encoding!r} is unknown; choose one of {', '.join(ENCODINGS)}"
        )
