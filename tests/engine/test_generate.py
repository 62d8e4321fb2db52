"""Answers of /generate: tokens, log-probs, finish reasons, seeds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

PROMPT = [10, 20, 30, 40, 50, 60]
META_KEYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "weight_versions",
    "num_retractions",
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "e2e_latency",
}


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


@pytest.fixture(scope="module")
def reference(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(model, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    table = (model(torch.tensor([prompt + output])).logits[0].float() / temperature).log_softmax(-1)
    return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(output)]


def test_reply_has_the_keys_of_the_native_api(api):
    answer = api.greedy(PROMPT, 5)
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert META_KEYS <= set(meta)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (6, 5, 0)
    assert meta["input_token_logprobs"] == []
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[2] is None for entry in meta["output_token_logprobs"])
    version = api.client.weight_version()
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 5}]


def test_no_logprob_keys_unless_asked(api):
    meta = api.greedy(PROMPT, 2, return_logprob=False)["meta_info"]
    assert not [key for key in meta if "logprobs" in key]


def test_greedy_tokens_and_logprobs_equal_transformers(api, reference):
    answer = api.greedy(PROMPT, 24)
    output = answer["output_ids"]
    with torch.no_grad():
        table = reference(torch.tensor([PROMPT + output])).logits[0]
    assert output == table[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert logprobs(answer) == pytest.approx(reference_logprobs(reference, PROMPT, output), abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.0, "min_p": 0.3},
    ],
)
def test_logprobs_are_taken_after_temperature_and_before_filters(api, reference, sampling):
    answer = api.generate(PROMPT, {**sampling, "max_new_tokens": 6, "ignore_eos": True})
    expected = reference_logprobs(reference, PROMPT, answer["output_ids"], sampling["temperature"])
    assert logprobs(answer) == pytest.approx(expected, abs=1e-4)


def test_input_logprobs_start_with_null_and_equal_transformers(api, reference):
    meta = api.greedy(PROMPT, 1, logprob_start_len=0)["meta_info"]
    entries = meta["input_token_logprobs"]
    assert entries[0] == [None, PROMPT[0], None]
    assert [entry[1] for entry in entries] == PROMPT
    expected = reference_logprobs(reference, PROMPT[:1], PROMPT[1:])
    assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-4)


def test_scoring_without_output_returns_prompt_logprobs_only(api):
    answer = api.generate(PROMPT, {"max_new_tokens": 0, "temperature": 0}, logprob_start_len=2)
    assert answer["output_ids"] == []
    assert [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]] == PROMPT[2:]


def test_top_logprobs_are_sorted_and_start_with_the_greedy_token(api):
    answer = api.greedy(PROMPT, 3, top_logprobs_num=4, logprob_start_len=0)
    meta = answer["meta_info"]
    for line, token, chosen in zip(meta["output_top_logprobs"], answer["output_ids"], logprobs(answer), strict=True):
        values = [entry[0] for entry in line]
        assert len(line) == 4
        assert values == sorted(values, reverse=True)
        assert line[0][1] == token
        assert line[0][0] == pytest.approx(chosen, abs=1e-6)
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"]) == len(PROMPT)


def test_text_prompt_equals_its_ids(api):
    by_text = api.greedy(None, 5, text="hello")
    ids = [
        entry[1]
        for entry in api.greedy(None, 1, text="hello", logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    ]
    assert by_text["output_ids"] == api.greedy(ids, 5)["output_ids"]


def test_list_call_answers_in_order_and_keeps_rids(api):
    prompts = [PROMPT, PROMPT[:3], [7]]
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    answers = api.generate(prompts, sampling, rid=["a", "b", "c"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [6, 3, 1]
    assert [answer["output_ids"] for answer in answers] == [api.greedy(p, 4)["output_ids"] for p in prompts]


def test_list_call_takes_sampling_params_per_prompt(api):
    params = [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 3, "ignore_eos": True}]
    answers = api.generate([PROMPT, PROMPT], params)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 3]


def test_n_gives_different_answers(api):
    answers = api.generate(PROMPT, {"n": 3, "max_new_tokens": 8, "temperature": 1.5, "ignore_eos": True}, rid="x")
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3


@pytest.mark.embedded_only
def test_samples_of_one_prompt_share_its_prefill_and_equal_single_calls(api):
    prompts = [PROMPT, [9] * 70, PROMPT, [9] * 70, [8], PROMPT]
    answers = api.generate(prompts, {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}, logprob_start_len=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = api.greedy(prompt, 10, logprob_start_len=0)
        assert answer["output_ids"] == alone["output_ids"]
        assert logprobs(answer) == pytest.approx(logprobs(alone), abs=1e-5)
        inputs = [[entry[0] for entry in a["meta_info"]["input_token_logprobs"][1:]] for a in (answer, alone)]
        assert inputs[0] == pytest.approx(inputs[1], abs=1e-5)
    assert sum(answer["meta_info"]["cached_tokens"] > 0 for answer in answers) == 3


def test_batch_composition_does_not_change_logprobs(api):
    alone = api.greedy(PROMPT, 12)
    prompts = [[i + 1] * (3 * i + 2) for i in range(7)] + [PROMPT]
    crowd = api.generate(prompts, {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True})
    assert crowd[-1]["output_ids"] == alone["output_ids"]
    assert logprobs(crowd[-1]) == pytest.approx(logprobs(alone), abs=1e-5)


@pytest.mark.embedded_only
def test_same_sampling_seed_repeats_in_any_batch(api):
    seeded = {"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": 7, "ignore_eos": True}
    other = {"temperature": 1.0, "max_new_tokens": 9, "ignore_eos": True}
    alone = api.generate(PROMPT, seeded)["output_ids"]
    crowd = api.generate([[3, 4], [5] * 30, PROMPT, [9]], [other, other, seeded, {**other, "top_p": 0.9}])
    assert crowd[2]["output_ids"] == alone
    assert api.generate(PROMPT, {**seeded, "sampling_seed": 8})["output_ids"] != alone


@pytest.mark.embedded_only
def test_answers_of_one_request_are_those_of_single_requests_whose_seeds_count_up(api):
    seeded = {"temperature": 1.0, "max_new_tokens": 10, "sampling_seed": 40, "ignore_eos": True}
    together = api.generate(PROMPT, {**seeded, "n": 3})
    alone = [api.generate(PROMPT, {**seeded, "sampling_seed": 40 + i}) for i in range(3)]
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]
    for both in zip(together, alone, strict=True):
        assert logprobs(both[0]) == pytest.approx(logprobs(both[1]), abs=1e-5)
    assert len({tuple(a["output_ids"]) for a in together}) == 3 == len({a["meta_info"]["id"] for a in together})


def test_requests_without_seed_differ(api):
    sampling = {"temperature": 1.5, "max_new_tokens": 12, "ignore_eos": True}
    assert api.generate(PROMPT, sampling)["output_ids"] != api.generate(PROMPT, sampling)["output_ids"]


def test_concurrent_calls_are_all_answered(api):
    def call(i: int) -> int:
        return api.generate([i + 1], {"max_new_tokens": 5 + i % 7, "ignore_eos": True})["meta_info"][
            "completion_tokens"
        ]

    with ThreadPoolExecutor(24) as pool:  # more than run at once
        assert list(pool.map(call, range(48))) == [5 + i % 7 for i in range(48)]


def test_stop_token_stays_in_ids_and_leaves_the_text(api):
    token = api.greedy(PROMPT, 4)["output_ids"][2]
    sampling = {"temperature": 0, "max_new_tokens": 9, "stop_token_ids": [token], "skip_special_tokens": False}
    trimmed = api.generate(PROMPT, sampling)
    kept = api.generate(PROMPT, {**sampling, "no_stop_trim": True})
    ids = trimmed["output_ids"]
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert ids[-1] == token and token not in ids[:-1]
    assert kept["output_ids"] == ids
    assert kept["text"].startswith(trimmed["text"])
    assert len(trimmed["text"]) < len(kept["text"])


def test_stop_string_across_token_boundaries(api):
    whole = api.greedy([1, 2, 3], 40)["text"]
    start = next(i for i in range(4, 30) if "\ufffd" not in whole[i : i + 3])
    stop = whole[start : start + 3]
    sampling = {"temperature": 0, "max_new_tokens": 40, "stop": ["never there", stop], "ignore_eos": True}
    trimmed = api.generate([1, 2, 3], sampling)
    kept = api.generate([1, 2, 3], {**sampling, "no_stop_trim": True})
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert trimmed["text"] == whole[: whole.find(stop)]
    assert kept["text"] == whole[: whole.find(stop) + len(stop)]
    assert trimmed["meta_info"]["completion_tokens"] == len(trimmed["output_ids"]) < 40


def test_min_new_tokens_holds_back_stop_tokens(api):
    token = api.greedy(PROMPT, 1)["output_ids"][0]
    sampling = {"temperature": 0, "max_new_tokens": 6, "min_new_tokens": 4, "stop_token_ids": [token]}
    assert api.generate(PROMPT, sampling)["meta_info"]["completion_tokens"] >= 4


def test_frequency_penalty_breaks_repetition(api):
    prompt = [10, 20, 30]
    sampling = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    plain = api.generate(prompt, sampling)["output_ids"]
    penalised = api.generate(prompt, {**sampling, "presence_penalty": 2.0, "frequency_penalty": 2.0})["output_ids"]
    assert len(set(penalised)) > len(set(plain))


def test_top_k_one_is_greedy(api):
    sampled = api.generate(PROMPT, {"temperature": 1.0, "top_k": 1, "max_new_tokens": 8, "ignore_eos": True})
    assert sampled["output_ids"] == api.greedy(PROMPT, 8)["output_ids"]


@pytest.mark.embedded_only
def test_context_is_used_to_the_last_token_and_not_beyond(api):
    limit = api.client.server_info()["context_length"]
    room = 5
    prompt = [i % 200 for i in range(limit - room)]
    assert api.greedy(prompt, room)["meta_info"]["completion_tokens"] == room
    assert (
        api.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": room + 1}}).status_code == 400
    )
