"""Tokens of ended requests are not read again, and nothing but the time changes by that."""

from __future__ import annotations

import pytest

TURN = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def user_turn(number: int) -> list[int]:
    return [(7 * number + 3 * i) % 250 for i in range(30)]


def test_each_turn_of_a_conversation_reads_only_what_is_new(api):
    ids, turns = [], []
    for number in range(4):
        ids = ids + user_turn(number)
        answer = api.generate(ids, TURN)
        turns.append((list(ids), answer))
        ids = ids + answer["output_ids"]
    cached = [answer["meta_info"]["cached_tokens"] for _, answer in turns]
    assert cached[0] == 0
    for (asked, _), (_, before), got in zip(turns[1:], turns, cached[1:], strict=False):
        # All of the turn before but its last token, which was sampled and never read.
        known = len(asked) - len(user_turn(0))
        assert known - 1 <= got <= known, (got, known, before["meta_info"]["prompt_tokens"])
    read = sum(answer["meta_info"]["prompt_tokens"] - c for (_, answer), c in zip(turns, cached, strict=True))
    assert read <= 4 * 30 + 3
    api.client.flush_cache(10)
    for asked, answer in turns:
        alone = api.generate(asked, TURN)
        assert alone["output_ids"] == answer["output_ids"]
        assert logprobs(alone) == pytest.approx(logprobs(answer), abs=1e-5)
        api.client.flush_cache(10)


def test_branches_of_one_beginning_share_it(api):
    base = user_turn(1)
    api.generate(base, TURN)
    branches = [base + [9] * 20, base + [8] * 25, base[:20] + [5] * 9]
    answers = api.generate(branches, TURN)
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [30, 30, 20]
    api.client.flush_cache(10)
    for branch, answer in zip(branches, answers, strict=True):
        alone = api.generate(branch, TURN)
        assert alone["output_ids"] == answer["output_ids"]
        assert logprobs(alone) == pytest.approx(logprobs(answer), abs=1e-5)
        api.client.flush_cache(10)


def test_flush_forgets(api):
    ids = user_turn(2)
    api.generate(ids, TURN)
    assert api.generate(ids, TURN)["meta_info"]["cached_tokens"] == len(ids) - 1
    api.client.flush_cache(10)
    assert api.generate(ids, TURN)["meta_info"]["cached_tokens"] == 0


def test_new_weights_forget(api, model_dir, original_weights, other_model_dir):
    ids = user_turn(3)
    old = api.generate(ids, TURN)
    api.client.update_weights_from_disk(str(other_model_dir), weight_version="1")
    new = api.generate(ids, TURN)
    assert new["meta_info"]["cached_tokens"] == 0
    assert new["output_ids"] != old["output_ids"]
    api.client.flush_cache(10)
    assert logprobs(api.generate(ids, TURN)) == pytest.approx(logprobs(new), abs=1e-5)


def test_scored_prompt_tokens_are_read(api):
    ids = user_turn(4)
    api.generate(ids, TURN)
    whole = api.generate(ids, TURN, logprob_start_len=0)["meta_info"]
    assert whole["cached_tokens"] == 0
    assert len(whole["input_token_logprobs"]) == len(ids)
    part = api.generate(ids, TURN, logprob_start_len=20)["meta_info"]
    assert 0 < part["cached_tokens"] <= 20
    later = [entry[0] for entry in part["input_token_logprobs"][1:]]
    assert later == pytest.approx([entry[0] for entry in whole["input_token_logprobs"][21:]], abs=1e-5)


def test_aborted_answer_is_gone_on_with(api):
    ids = user_turn(5)
    whole = api.generate(ids, {**TURN, "max_new_tokens": 40})
    api.client.flush_cache(10)
    part = api.generate(ids, TURN)
    rest = api.generate(ids + part["output_ids"], {**TURN, "max_new_tokens": 28})
    assert rest["meta_info"]["cached_tokens"] >= len(ids) + 11
    assert part["output_ids"] + rest["output_ids"] == whole["output_ids"]
    assert logprobs(part) + logprobs(rest) == pytest.approx(logprobs(whole), abs=1e-5)
