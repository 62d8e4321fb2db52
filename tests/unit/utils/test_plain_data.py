"""Values of samples survive a weights-only file."""

import io

import numpy
import pytest
import torch
from PIL import Image

from slime.utils import plain_data
from slime.utils.plain_data import (
    Shared,
    fields_from_plain,
    fields_to_plain,
    from_plain,
    same,
    to_plain,
    with_shared_leaves,
    without_plain_form,
)


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


def test_texts_complex_numbers_and_half_floats_in_arrays_come_back():
    value = {"names": numpy.array(["a", "bcd"]), "wave": numpy.array([1 + 2j]), "half": numpy.ones(3, numpy.float16)}
    assert same(through_file(value), value) and without_plain_form(value) is None


class Odd:
    def __str__(self):
        return "odd"


def test_values_without_a_form_become_text_which_is_said_once(caplog):
    for _ in range(2):
        assert to_plain({"metadata": {"when": [Odd()]}}) == {"metadata": {"when": ["odd"]}}
    assert caplog.text.count("metadata.when: values of type Odd have no form in files") == 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"images": [None, Odd()]}, "['images'][1] is a "),
        ([{"deep": (1, {2})}], "[0]['deep'][1] is a builtins.set"),
        ({"grid": numpy.array([Odd()])}, "['grid'] is a numpy.ndarray"),
    ],
)
def test_the_place_without_a_form_is_named(value, place):
    assert without_plain_form(value).startswith(place)


def sample_file(samples):
    shared, stream = Shared(), io.BytesIO()
    torch.save([fields_to_plain(fields, shared) for fields in samples], stream)
    return stream


def test_what_samples_share_is_in_a_file_once_and_one_object_after_reading():
    noise = Image.effect_noise((300, 200), 90)
    pixels, sound = torch.rand(50, 50), numpy.random.default_rng(0).random(5000)
    alike = [noise, noise, noise.copy()]  # the last one: an equal image of its own
    samples = [
        {
            "multimodal_inputs": {"images": [image], "audios": [sound]},
            "multimodal_train_inputs": {"pixel_values": pixels},
        }
        for image in alike
    ]
    stream = sample_file(samples)
    assert len(stream.getvalue()) < 1.1 * len(sample_file(samples[:1]).getvalue())
    stream.seek(0)
    shared = Shared()
    back = [fields_from_plain(fields, shared) for fields in torch.load(stream, weights_only=True)]
    assert same(back, samples)
    for name, index in (("images", 0), ("audios", 0)):
        assert len({id(fields["multimodal_inputs"][name][index]) for fields in back}) == 1
        assert len({id(fields["multimodal_inputs"][name]) for fields in back}) == 3  # the lists are each one's own
    assert len({id(fields["multimodal_train_inputs"]["pixel_values"]) for fields in back}) == 1


def test_equal_values_outside_of_media_stay_apart():
    samples = [{"metadata": {"state": numpy.zeros(1000)}} for _ in range(2)]
    stream = sample_file(samples)
    stream.seek(0)
    first, second = (fields_from_plain(fields, Shared()) for fields in torch.load(stream, weights_only=True))
    first["metadata"]["state"][0] = 1
    assert second["metadata"]["state"][0] == 0


def test_only_media_are_looked_through_for_equal_ones(monkeypatch):
    monkeypatch.setattr(plain_data, "_digest", lambda content: pytest.fail("megabytes per sample"))
    fields_to_plain({"rollout_routed_experts": torch.zeros(1000), "metadata": {"a": numpy.zeros(1000)}}, Shared())


def test_a_file_written_before_media_were_shared_is_read():
    plain = [
        to_plain({"multimodal_inputs": {"images": [Image.new("RGB", (4, 3), "red")]}}, exact=True) for _ in range(2)
    ]
    stream = io.BytesIO()
    torch.save(plain, stream)
    stream.seek(0)
    shared = Shared()
    back = [fields_from_plain(fields, shared) for fields in torch.load(stream, weights_only=True)]
    assert all(fields["multimodal_inputs"]["images"][0].getpixel((0, 0)) == (255, 0, 0) for fields in back)


def test_copies_have_their_own_containers_and_the_same_images():
    image, odd = Image.new("RGB", (2, 2)), Odd()
    value = {"images": [image], "parts": ({"a": torch.ones(2)}, odd)}
    twin = with_shared_leaves(value)
    assert twin["images"] is not value["images"] and twin["images"][0] is image
    assert twin["parts"][0]["a"] is value["parts"][0]["a"] and twin["parts"][1] is not odd
