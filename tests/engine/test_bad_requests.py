"""Wrong payloads are answered with 400 and a message; the engine lives on."""

from __future__ import annotations

import pytest

BAD_BODIES = {
    "no prompt": {"sampling_params": {}},
    "empty prompt": {"input_ids": []},
    "empty prompt in a list": {"input_ids": [[1], []]},
    "both prompts": {"input_ids": [1], "text": "a"},
    "id above the vocabulary": {"input_ids": [10**6]},
    "negative id": {"input_ids": [3, -1]},
    "boolean id": {"input_ids": [True]},
    "float id": {"input_ids": [1.5]},
    "string ids": {"input_ids": "abc"},
    "text is a number": {"text": 5},
    "negative temperature": {"input_ids": [1], "sampling_params": {"temperature": -1}},
    "temperature is text": {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
    "top_p zero": {"input_ids": [1], "sampling_params": {"top_p": 0}},
    "top_k zero": {"input_ids": [1], "sampling_params": {"top_k": 0}},
    "unknown sampling key": {"input_ids": [1], "sampling_params": {"bogus": 1}},
    "sampling_params is a string": {"input_ids": [1], "sampling_params": "x"},
    "custom_params is a list": {"input_ids": [1], "sampling_params": {"custom_params": [1]}},
    "negative max_new_tokens": {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    "too long": {"input_ids": [1], "sampling_params": {"max_new_tokens": 10**7}},
    "rid list of wrong length": {"input_ids": [[1], [2]], "rid": ["a"]},
    "image for a text model": {"text": "a", "image_data": ["data:image/png;base64,AA=="]},
    "sound for a text model": {"input_ids": [1], "audio_data": "a.wav"},
    "logprob_start_len beyond the prompt": {"input_ids": [1], "return_logprob": True, "logprob_start_len": 5},
}


#: bodies that SGLang takes, or that end it (a token id outside the vocabulary kills it on a CPU)
EMBEDDED_ONLY = {
    *("id above the vocabulary", "negative id", "boolean id", "float id", "string ids", "empty prompt in a list"),
    *("both prompts", "text is a number", "temperature is text", "unknown sampling key", "sampling_params is a string"),
    *("custom_params is a list", "image for a text model", "sound for a text model"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.embedded_only] if name in EMBEDDED_ONLY else []) for name in BAD_BODIES],
)
def test_bad_generate_body_is_a_400_with_a_message(api, name):
    response = api.post("/generate", BAD_BODIES[name])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert api.get("/health").status_code == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b"\xff\xfe"])
@pytest.mark.parametrize("path", ["/generate", "/abort_request", "/update_weights_from_distributed"])
def test_body_that_is_no_json_object_is_a_400(api, path, raw):
    assert api.http.post(path, content=raw).status_code == 400


def test_harmless_keys_and_nulls_are_accepted(api):
    sampling = {
        "max_new_tokens": 2,
        "spaces_between_special_tokens": False,
        "custom_params": {"return_top_p_token_ids": True},
        "stop": None,
        "top_p": None,
        "json_schema": None,
        "sampling_seed": None,
    }
    response = api.post(
        "/generate", {"input_ids": [1], "model": None, "bogus": 1, "stream": False, "sampling_params": sampling}
    )
    assert response.status_code == 200, response.text


def test_unknown_path_is_a_404(api):
    assert api.post("/no_such_thing").status_code == 404


@pytest.mark.embedded_only  # SGLang takes some, and says it in other forms
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "sideways"}),
        ("/abort_request", {}),
        ("/weights_checker", {"action": "dance"}),
        ("/init_weights_update_group", {"group_name": "g"}),
        ("/destroy_weights_update_group", {"group_name": "never made"}),
        ("/update_weights_from_disk", {"model_path": "/nonexistent"}),
        ("/get_weights_by_name", {"name": "model.nothing"}),
        ("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": "all"}),
        ("/release_memory_occupation", {"tags": ["soul"]}),
        ("/release_memory_occupation", {"tags": 5}),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}),
        ("/update_weights_from_distributed", {"names": "a", "dtypes": [], "shapes": []}),
    ],
)
def test_bad_control_call_is_a_400_and_says_why(api, path, body):
    response = api.post(path, body)
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert response.json()["message"]
    assert api.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
def test_pause_and_continue_need_a_json_body(api, path):
    assert api.http.post(path).status_code == 400
