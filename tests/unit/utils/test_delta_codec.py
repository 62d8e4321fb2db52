"""Byte differences: every encoding gives the new bytes back, and refuses payloads that do not fit."""

from __future__ import annotations

import random

import pytest

from slime.utils import delta_codec


@pytest.mark.parametrize("encoding", delta_codec.ENCODINGS)
@pytest.mark.parametrize("size, changes", [(0, 0), (1, 1), (64, 0), (1000, 3), (1000, 1000)])
def test_decoding_gives_the_new_bytes(encoding, size, changes):
    generator = random.Random(size + changes)
    old = generator.randbytes(size)
    new = bytearray(old)
    for place in generator.sample(range(size), changes):
        new[place] ^= generator.randrange(1, 256)
    payload = delta_codec.encode(old, bytes(new), encoding)
    assert delta_codec.decode(old, payload, encoding) == bytes(new)
    assert delta_codec.changed_bytes(old, bytes(new)) == changes
    assert len(payload) == (size if encoding == "xor" else 4 + 5 * changes)


def test_wrong_payloads_are_refused():
    payload = delta_codec.encode(b"abc", b"abd", "overwrite")
    for bad in (b"", b"\0\0", payload[:-1], payload + b"x"):
        with pytest.raises(ValueError, match="payload"):
            delta_codec.decode(b"abc", bad, "overwrite")
    with pytest.raises(ValueError, match="writes byte 2 of a tensor of 2 bytes"):
        delta_codec.decode(b"ab", payload, "overwrite")
    for call in (delta_codec.encode, delta_codec.decode):
        with pytest.raises(ValueError, match="different size: 3 and 2"):
            call(b"abc", b"ab", "xor")
        with pytest.raises(ValueError, match="--update-weight-delta-encoding 'zip'"):
            call(b"abc", b"abc", "zip")
