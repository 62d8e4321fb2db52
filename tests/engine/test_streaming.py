"""Server-sent events: each piece holds the answer so far, the last one all of it."""

from __future__ import annotations

import json

import pytest

PROMPT = [10, 20, 30, 40]


def stream(api, body: dict) -> list[dict]:
    with api.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def assert_pieces_grow(pieces: list[dict]) -> None:
    """Text and ids of each piece begin with those of the piece before."""
    for before, after in zip(pieces, pieces[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]


def test_pieces_grow_to_the_whole_answer(api):
    sampling = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    whole = api.generate(PROMPT, sampling)
    pieces = stream(api, body)
    assert_pieces_grow(pieces)
    assert len(pieces) > 5
    assert (pieces[-1]["text"], pieces[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    for piece in pieces:
        meta = piece["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == piece["output_ids"]
        assert meta["completion_tokens"] == len(piece["output_ids"]) == meta["output_token_logprobs_length"]
    assert {piece["meta_info"]["finish_reason"] for piece in pieces[:-1]} == {None}
    assert pieces[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert pieces[-1]["meta_info"]["weight_versions"] == whole["meta_info"]["weight_versions"]


def test_no_part_of_a_stop_string_is_streamed(api):
    whole = api.greedy([1, 2, 3], 40)["text"]
    start = next(i for i in range(4, 30) if "\ufffd" not in whole[i : i + 3])
    sampling = {"temperature": 0, "max_new_tokens": 40, "stop": whole[start : start + 3], "ignore_eos": True}
    expected = api.generate([1, 2, 3], sampling)
    pieces = stream(api, {"input_ids": [1, 2, 3], "sampling_params": sampling})
    assert_pieces_grow(pieces)
    assert (pieces[-1]["text"], pieces[-1]["output_ids"]) == (expected["text"], expected["output_ids"])


def test_stop_token_text_is_not_streamed(api):
    token = api.greedy(PROMPT, 6)["output_ids"][4]
    sampling = {"temperature": 0, "max_new_tokens": 9, "stop_token_ids": [token], "ignore_eos": True}
    expected = api.generate(PROMPT, sampling)
    pieces = stream(api, {"input_ids": PROMPT, "sampling_params": sampling})
    assert_pieces_grow(pieces)
    assert pieces[-1]["text"] == expected["text"]


def test_list_call_streams_pieces_with_an_index(api):
    sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    pieces = stream(api, {"input_ids": [PROMPT, [7]], "sampling_params": sampling})
    for index, prompt in enumerate((PROMPT, [7])):
        mine = [piece["output_ids"] for piece in pieces if piece["index"] == index]
        assert mine[-1] == api.greedy(prompt, 5)["output_ids"]


@pytest.mark.embedded_only  # a token id outside the vocabulary ends SGLang on a CPU
def test_bad_streaming_request_is_a_400(api):
    assert api.post("/generate", {"input_ids": [-1], "stream": True}).status_code == 400
