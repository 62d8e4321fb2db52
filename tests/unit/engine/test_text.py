"""Text of answers: incremental pieces, stop strings, trimming."""

from __future__ import annotations

import random

import pytest

from slime.engine.sampling_params import SamplingParams
from slime.engine.tokenizer import EngineTokenizer, TextStream, find_stop, visible_ids
from slime.utils.tiny_model import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return EngineTokenizer(folder)


def pieces(tokenizer, ids: list[int], params: SamplingParams, final_text: str | None = None) -> list[str]:
    stream = TextStream(tokenizer, params)
    parts = [stream.push([i]) for i in ids]
    whole = tokenizer.decode(ids, params.skip_special_tokens) if final_text is None else final_text
    return [*parts, stream.finish(whole)]


def test_multibyte_characters_come_whole(tokenizer):
    text = "aé漢🙂z"
    parts = pieces(tokenizer, tokenizer.encode(text), SamplingParams())
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)


def test_random_bytes_join_to_the_whole_text(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(260) for _ in range(30)]
        assert "".join(pieces(tokenizer, ids, SamplingParams())) == tokenizer.decode(ids)


def test_start_of_a_stop_string_is_held_back(tokenizer):
    params = SamplingParams(stop=("END",))
    parts = pieces(tokenizer, tokenizer.encode("abcEN"), params, "abcEN")
    assert parts == ["a", "b", "c", "", "", "EN"]
    assert "".join(pieces(tokenizer, tokenizer.encode("abcEND"), params, "abc")) == "abc"
    assert "".join(pieces(tokenizer, tokenizer.encode("abcENX"), params)) == "abcENX"


def test_first_stop_string_wins():
    assert find_stop("a;b.", (".", ";")) == ";"
    assert find_stop("ab", (".",)) is None


def test_final_text_is_cut_at_the_stop_string_unless_kept(tokenizer):
    reason = {"type": "stop", "matched": "."}
    assert tokenizer.final_text("a.b", SamplingParams(stop=(".",)), reason) == "a"
    assert tokenizer.final_text("a.b", SamplingParams(stop=(".",), no_stop_trim=True), reason) == "a.b"


def test_stop_token_leaves_the_text_unless_kept():
    reason = {"type": "stop", "matched": 9}
    assert visible_ids([1, 9], SamplingParams(), reason) == [1]
    assert visible_ids([1, 9], SamplingParams(no_stop_trim=True), reason) == [1, 9]
    assert visible_ids([1, 9], SamplingParams(), {"type": "length", "length": 2}) == [1, 9]


def test_folder_without_tokenizer_serves_ids_only(tmp_path):
    tokenizer = EngineTokenizer(tmp_path)
    assert not tokenizer.is_available
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode_batch([[1], [2]]) == ["", ""]
    with pytest.raises(ValueError, match="input_ids"):
        tokenizer.encode("a")
