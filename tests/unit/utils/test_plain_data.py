"""Values of samples survive a weights-only file."""

import io

import numpy
import pytest
import torch
from PIL import Image

from slime.utils.plain_data import from_plain, same, to_plain


def through_file(value, exact=True):
    stream = io.BytesIO()
    torch.save(to_plain(value, exact), stream)
    stream.seek(0)
    return from_plain(torch.load(stream, weights_only=True))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P", "CMYK", "F", "I", "YCbCr", "HSV"])
def test_an_image_comes_back_pixel_by_pixel(mode):
    image = Image.effect_noise((7, 5), 80).convert(mode)
    image.putpixel((3, 2), image.getpixel((0, 0)))
    back = through_file({"images": [image, image]})["images"]
    assert all(type(item) is Image.Image and same(item.tobytes(), image.tobytes()) for item in back)
    assert [(item.mode, item.size) for item in back] == [(mode, (7, 5))] * 2


def test_containers_bytes_tensors_and_arrays_come_back():
    value = {
        "ids": [1, 2, 3],
        "audio": (numpy.arange(4, dtype=numpy.float32), 16000),
        "raw": b"\x00\xff",
        "pixels": torch.ones(2, 3, dtype=torch.bfloat16),
        "scalar": numpy.float32(0.5),
        7: [None, True, {"deep": [numpy.zeros((0, 2), numpy.int64)]}],
    }
    back = through_file(value)
    assert same(back, {**value, "scalar": 0.5}) and isinstance(back["audio"][0], numpy.ndarray)
    assert isinstance(through_file(value, exact=False)["audio"][0], torch.Tensor)


def test_equality_looks_into_images_and_arrays():
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    assert same({"a": [red]}, {"a": [red.copy()]}) and not same({"a": [red]}, {"a": [blue]})
    assert not same([1], (1,)) and not same({"a": 1}, {"b": 1}) and not same([1], [1, 2])
    assert not same(numpy.zeros(2), numpy.zeros(3)) and not same(torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize("make", [bytearray, memoryview, io.BytesIO])
def test_buffers_of_bytes_become_bytes_not_text(make):
    assert through_file({"audios": [make(b"RIFF\x00\xff")]}) == {"audios": [b"RIFF\x00\xff"]}
