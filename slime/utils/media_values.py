"""What may stand in a sample's media: values that files, engines and processors take.

Decoders of sound and video (torchcodec's, those of `datasets`) become the bytes and the path, or the samples and the rate, that they
hold; sound that is samples becomes a WAV file for an engine. What nothing can keep is named. Does not know rows or files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

from slime.utils.plain_data import MEDIA_FIELDS, is_image, without_plain_form

RATE_KEYS = ("sampling_rate", "sample_rate")


def as_data(value: Any) -> Any:
    """The value, or a copy of the container, in which decoders are `{"bytes", "path"}` or `{"array", "sampling_rate"}`."""
    if type(value) is dict:
        copied = {key: as_data(item) for key, item in value.items()}
        return copied if any(copied[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        items = type(value)(map(as_data, value))
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in (str, bytes, int, float, bool, type(None)) or is_image(value) or hasattr(value, "dtype"):
        return value
    return _decoded(value) or value


def _decoded(value: Any) -> dict[str, Any] | None:
    encoded = getattr(value, "_hf_encoded", None)  # what `datasets` decoded it from
    if isinstance(encoded, Mapping) and (encoded.get("bytes") is not None or encoded.get("path")):
        return {"bytes": encoded.get("bytes"), "path": encoded.get("path")}
    samples = value.get_all_samples() if hasattr(value, "get_all_samples") else value
    rate = next((getattr(samples, key) for key in RATE_KEYS if hasattr(samples, key)), None)
    array = getattr(samples, "data", getattr(samples, "array", None))
    return {"array": _mono_or_channels(array), "sampling_rate": int(rate)} if rate and array is not None else None


def _mono_or_channels(array: Any) -> Any:
    """Samples as an array [samples], or [channels, samples] when there are several."""
    import numpy as np

    array = np.asarray(array, dtype=np.float32)
    return array[0] if array.ndim == 2 and len(array) == 1 else array


def settle_media(sample: Any, is_kept: bool, source: str) -> None:
    """Make the media of a sample data, in place, before anybody uses them.

    Args:
        is_kept: whether checkpoints or dumps will hold the sample.
        source: who made it.
    Raises:
        ValueError: something in them could not come back from a file although it is kept; names the sample, key and type.
    """
    for name in MEDIA_FIELDS:
        value = getattr(sample, name)
        if value is None or isinstance(value, str):
            continue
        value = as_data(value)
        setattr(sample, name, value)
        place = without_plain_form(value) if is_kept else None
        if place:
            raise ValueError(
                f"{source}: sample {sample.index}: {name}{place}, which checkpoints and dumps (--save, "
                "--save-debug-rollout-data) could not give back: use images, bytes, paths, arrays, tensors, numbers, texts, "
                'or {"bytes", "path"} and {"array", "sampling_rate"} for a decoder'
            )


def keeps_samples(args) -> bool:
    """Whether the run writes samples into files."""
    return bool(args.save or args.save_debug_rollout_data)


def samples_and_rate(item: Any) -> tuple[Any, int] | None:
    """Sound as (array [samples] or [channels, samples], rate in Hz) of `{"array", "sampling_rate"}` or of such a pair."""
    if isinstance(item, Mapping) and item.get("array") is not None and item.get("sampling_rate"):
        item = (item["array"], item["sampling_rate"])
    if isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], (str, bytes)):
        return _mono_or_channels(item[0]), int(item[1])
    return None


def wav_file(array: Any, rate: int) -> bytes:
    """A WAV file of 32-bit floats, which keeps the samples exactly.

    Args:
        array: float32 [samples] or [channels, samples], within -1 and 1.
    """
    channels = 1 if array.ndim == 1 else len(array)
    frames = array.T.astype("<f4").tobytes()
    size = 4 * channels
    header = struct.pack("<4sIHHIIHHH", b"fmt ", 18, 3, channels, rate, rate * size, size, 32, 0)
    facts = struct.pack("<4sII", b"fact", 4, len(frames) // size)
    body = b"WAVE" + header + facts + struct.pack("<4sI", b"data", len(frames)) + frames
    return struct.pack("<4sI", b"RIFF", len(body)) + body
