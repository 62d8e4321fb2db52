"""Server-sent events: pieces are incremental and join to the whole answer."""

from __future__ import annotations

import json

PROMPT = [10, 20, 30, 40]


def stream(api, body: dict) -> list[dict]:
    with api.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_pieces_join_to_the_whole_answer(api):
    sampling = {"temperature": 1.0, "max_new_tokens": 50, "sampling_seed": 3, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    whole = api.generate(PROMPT, sampling)
    pieces = stream(api, body)
    assert len(pieces) == 50
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [i for piece in pieces for i in piece["output_ids"]] == whole["output_ids"]
    joined = [entry for piece in pieces for entry in piece["meta_info"]["output_token_logprobs"]]
    assert [entry[1] for entry in joined] == whole["output_ids"]
    assert [piece["meta_info"]["completion_tokens"] for piece in pieces] == list(range(1, 51))
    assert [piece["meta_info"]["finish_reason"] for piece in pieces[:-1]] == [None] * 49
    assert pieces[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert pieces[-1]["meta_info"]["weight_versions"] == whole["meta_info"]["weight_versions"]


def test_no_part_of_a_stop_string_is_streamed(api):
    whole = api.greedy([1, 2, 3], 40)["text"]
    start = next(i for i in range(4, 30) if "\ufffd" not in whole[i : i + 3])
    sampling = {"temperature": 0, "max_new_tokens": 40, "stop": whole[start : start + 3], "ignore_eos": True}
    expected = api.generate([1, 2, 3], sampling)
    pieces = stream(api, {"input_ids": [1, 2, 3], "sampling_params": sampling})
    assert "".join(piece["text"] for piece in pieces) == expected["text"]
    assert [i for piece in pieces for i in piece["output_ids"]] == expected["output_ids"]


def test_stop_token_text_is_not_streamed(api):
    token = api.greedy(PROMPT, 6)["output_ids"][4]
    sampling = {"temperature": 0, "max_new_tokens": 9, "stop_token_ids": [token], "ignore_eos": True}
    expected = api.generate(PROMPT, sampling)
    pieces = stream(api, {"input_ids": PROMPT, "sampling_params": sampling})
    assert "".join(piece["text"] for piece in pieces) == expected["text"]


def test_list_call_streams_pieces_with_an_index(api):
    sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    pieces = stream(api, {"input_ids": [PROMPT, [7]], "sampling_params": sampling})
    for index, prompt in enumerate((PROMPT, [7])):
        mine = [i for piece in pieces if piece["index"] == index for i in piece["output_ids"]]
        assert mine == api.greedy(prompt, 5)["output_ids"]


def test_bad_streaming_request_is_a_400(api):
    assert api.post("/generate", {"input_ids": [-1], "stream": True}).status_code == 400
