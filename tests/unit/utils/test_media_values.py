"""Decoders and sound become data; media that no file could give back are named."""

import io
import wave
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from slime.utils.data import RowFormat, row_to_sample
from slime.utils.media_values import as_data, samples_and_rate, settle_media, wav_file
from slime.utils.processing_utils import build_processor_kwargs, media_for_engine
from slime.utils.types import Sample

SOUND = numpy.array([0.0, 0.5, -0.25], dtype=numpy.float32)


class Decoder:
    """As torchcodec's AudioDecoder."""

    def __init__(self, channels=1):
        self.channels = channels

    def get_all_samples(self):
        return SimpleNamespace(data=torch.from_numpy(SOUND).repeat(self.channels, 1), sample_rate=8000)


class HubDecoder(Decoder):
    """As the one of `datasets`, which knows what it was made from."""

    def __init__(self, encoded):
        super().__init__()
        self._hf_encoded = encoded


def test_a_decoder_becomes_its_file_or_its_samples():
    assert as_data([HubDecoder({"bytes": b"RIFF", "path": "a.wav"})]) == [{"bytes": b"RIFF", "path": "a.wav"}]
    mono, stereo = as_data([Decoder(), Decoder(2)])
    assert mono["sampling_rate"] == 8000 and mono["array"].tolist() == SOUND.tolist()
    assert stereo["array"].shape == (2, 3)
    plain = {"audio": ["a.wav", {"bytes": b"x", "path": None}], "n": 1}
    assert as_data(plain) is plain and as_data((Path("a.wav"),)) == ("a.wav",)


def test_decoders_of_a_row_are_data_in_the_sample_and_in_its_prompt():
    fmt = RowFormat(multimodal_keys={"audio": "sounds"})
    row = {"input": "<audio> who?", "sounds": [HubDecoder({"bytes": b"RIFF", "path": None})]}
    sample = row_to_sample(row, "Source.get_samples", fmt)
    assert sample.multimodal_inputs["audios"] == [{"bytes": b"RIFF", "path": None}]
    assert sample.prompt[0]["content"][0]["audio"] == {"bytes": b"RIFF", "path": None}
    assert media_for_engine(sample.multimodal_inputs) == {"audio_data": ["data:audio/wav;base64,UklGRg=="]}


@pytest.mark.parametrize("name", ["multimodal_inputs", "multimodal_train_inputs"])
def test_media_that_files_would_not_give_back_are_named_where_files_are_written(name):
    sample = Sample(index=3)
    setattr(sample, name, {"clips": [object()]})
    settle_media(sample, False, "generation")
    with pytest.raises(ValueError, match=rf"generation: sample 3: {name}\['clips'\]\[0\] is a builtins.object, which"):
        settle_media(sample, True, "generation")


@pytest.mark.parametrize("form", [{"array": SOUND, "sampling_rate": 8000}, (SOUND, 8000)])
def test_sound_as_samples_reaches_engines_as_a_file_and_processors_as_arrays(form):
    import base64

    (uri,) = media_for_engine({"audios": [form]})["audio_data"]
    head, body = uri.split(",")
    assert head == "data:audio/wav;base64" and base64.b64decode(body) == wav_file(SOUND, 8000)
    kwargs = build_processor_kwargs({"audios": [form, form]})
    assert [array.tolist() for array in kwargs["audio"]] == [SOUND.tolist()] * 2 and kwargs["sampling_rate"] == 8000
    other_rate = {"array": SOUND, "sampling_rate": 16000}
    assert "sampling_rate" not in build_processor_kwargs({"audios": [form, other_rate]})


def test_a_wav_file_keeps_the_samples():
    content = wav_file(numpy.stack([SOUND, -SOUND]), 8000)
    assert content[:4] == b"RIFF" and len(content) == 8 + int.from_bytes(content[4:8], "little")
    data = content[content.index(b"data") + 8 :]
    assert numpy.frombuffer(data, "<f4").reshape(-1, 2).T.tolist() == [SOUND.tolist(), (-SOUND).tolist()]
    try:
        with wave.open(io.BytesIO(content)) as file:
            assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 3)
    except wave.Error:  # before Python 3.12 it reads whole numbers only
        pass


def test_what_is_no_sound_as_samples():
    assert samples_and_rate(("a.wav", 3)) is None and samples_and_rate({"bytes": b"x"}) is None
