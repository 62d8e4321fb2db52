"""Top-p replay: which ids the filters kept at each token, and log-probs among them. Released SGLang cannot say so."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slime.utils.meta_info import int32_tensor
from tests.engine.test_streaming import stream

pytestmark = pytest.mark.embedded_only

PROMPT = [10, 20, 30, 40]
ASKS = {"custom_params": {"return_top_p_token_ids": True}, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32).eval()


def kept_ids(meta: dict) -> list[list[int]]:
    ids, offsets = int32_tensor(meta["top_p_token_ids"]), int32_tensor(meta["top_p_token_offsets"])
    assert offsets[0] == 0 and offsets[-1] == len(ids)
    return [part.tolist() for part in ids.split(offsets.diff().tolist())]


@torch.no_grad()
def assert_log_probs_among_the_kept(model, answer: dict, temperature: float) -> None:
    output, meta = answer["output_ids"], answer["meta_info"]
    table = model(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1] / temperature
    kept = kept_ids(meta)
    assert len(kept) == len(output) == len(meta["output_token_logprobs"])
    for line, ids, token, (logprob, *_) in zip(table, kept, output, meta["output_token_logprobs"], strict=True):
        assert token in ids and len(set(ids)) == len(ids)
        assert line[ids].min() >= line[[i for i in range(len(line)) if i not in ids]].max() - 1e-4
        assert logprob == pytest.approx(float(line[token] - line[ids].logsumexp(0)), abs=1e-4)


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_p": 0.9, "top_k": 5}, {"min_p": 0.2}], ids=str)
def test_log_probs_are_among_the_ids_that_the_filters_kept(api, reference, filters):
    answer = api.generate(PROMPT, {**ASKS, **filters, "temperature": 1.3, "max_new_tokens": 12})
    assert_log_probs_among_the_kept(reference, answer, 1.3)
    kept = kept_ids(answer["meta_info"])
    assert max(map(len, kept)) > 1 and max(map(len, kept)) <= filters.get("top_k", 200)


def test_the_nucleus_is_the_smallest_that_holds_the_share(api, reference):
    answer = api.generate(PROMPT, {**ASKS, "top_p": 0.7, "max_new_tokens": 8})
    table = reference(torch.tensor([PROMPT + answer["output_ids"]])).logits[0, len(PROMPT) - 1 : -1].softmax(-1)
    for line, ids in zip(table, kept_ids(answer["meta_info"]), strict=True):
        masses = line[ids].sort(descending=True).values.cumsum(0)
        assert masses[-1] > 0.7 - 1e-5 and (len(ids) == 1 or masses[-2] < 0.7 + 1e-5)


def test_tokens_and_seeds_do_not_depend_on_whether_it_is_asked_for(api):
    sampling = {"top_p": 0.8, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5}
    plain, asked = api.generate(PROMPT, sampling), api.generate(PROMPT, {**sampling, **ASKS})
    assert plain["output_ids"] == asked["output_ids"] and "top_p_token_ids" not in plain["meta_info"]


@pytest.mark.parametrize("sampling", [{"temperature": 0, "top_p": 0.5}, {"temperature": 1.0}], ids=str)
def test_what_is_not_filtered_has_no_record(api, sampling):
    answer = api.generate(PROMPT, {**ASKS, **sampling, "max_new_tokens": 3})
    assert kept_ids(answer["meta_info"]) == [[], [], []]


def test_each_answer_of_a_group_has_its_own_record(api, reference):
    answers = api.generate(PROMPT, {**ASKS, "top_p": 0.8, "max_new_tokens": 6, "n": 3, "sampling_seed": 3})
    for answer in answers:
        assert_log_probs_among_the_kept(reference, answer, 1.0)
    assert len({str(kept_ids(answer["meta_info"])) for answer in answers}) == 3


def test_pieces_of_a_stream_carry_the_record_so_far(api):
    sampling = {**ASKS, "top_p": 0.8, "max_new_tokens": 20, "sampling_seed": 7}
    whole = kept_ids(api.generate(PROMPT, sampling)["meta_info"])
    pieces = stream(api, {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    for piece in pieces:
        assert kept_ids(piece["meta_info"]) == whole[: len(piece["output_ids"])]
    assert len(pieces) > 3 and kept_ids(pieces[-1]["meta_info"]) == whole


def test_records_survive_a_retraction_and_an_abort(api, reference):
    sampling = {**ASKS, "top_p": 0.8, "max_new_tokens": 4000, "sampling_seed": 9}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(api.generate, PROMPT, sampling, rid="long")
        api.wait_for_running(1)
        api.client.pause("retract")
        api.client.continue_generation()
        api.wait_for_running(1)
        api.client.abort("long")
        answer = future.result(60)
    assert answer["meta_info"]["num_retractions"] == 1 and 0 < len(answer["output_ids"]) < 4000
    assert_log_probs_among_the_kept(reference, answer, 1.0)
