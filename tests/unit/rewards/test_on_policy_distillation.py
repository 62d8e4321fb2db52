"""A teacher on an engine scores the student's tokens; the answer must fit the sample."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from slime.rollout import on_policy_distillation as opd
from slime.utils.types import Sample

FIELDS = dict(
    rm_url="http://teacher/generate", rollout_temperature=1.0, rollout_top_p=1.0, rm_timeout=5.0, reward_key=None
)
ARGS = SimpleNamespace(**FIELDS)


def reply(values) -> dict:
    return {"meta_info": {"input_token_logprobs": [[value, 7, None] for value in values]}}


def score(monkeypatch, answer, args=ARGS, response_length=2) -> tuple[Sample, list]:
    sent = []

    async def fake_post(url, payload, **options):
        sent.append((url, payload))
        return answer

    monkeypatch.setattr(opd, "post", fake_post)
    sample = Sample(index=3, prompt="p", tokens=[5, 6, 7, 8], response_length=response_length)
    assert asyncio.run(opd.reward_func(args, sample)) == 0.0
    return sample, sent


def test_log_probs_of_the_response_come_with_the_sample(monkeypatch):
    sample, sent = score(monkeypatch, reply([None, -1.0, -2.0, -3.0]))
    assert sample.teacher_log_probs == [-2.0, -3.0]
    sampling = {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False}
    payload = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    assert sent == [("http://teacher/generate", payload)]
    empty, _ = score(monkeypatch, reply([None, -1.0, -2.0, -3.0]), response_length=0)
    assert empty.teacher_log_probs == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"text": "hm"}, "holds no meta_info.input_token_logprobs"),
        (reply([None, -1.0]), "1 log-probs for 4 tokens of sample 3"),
        (reply([None, -1.0, None, -3.0]), "a log-prob of sample 3 is no finite number"),
        (reply([None, -1.0, -2.0, float("nan")]), "a log-prob of sample 3 is no finite number"),
    ],
)
def test_answer_that_does_not_fit_is_an_error(monkeypatch, answer, message):
    with pytest.raises(ValueError, match=f"--rm-url http://teacher/generate: .*{message}"):
        score(monkeypatch, answer)


@pytest.mark.parametrize(("flag", "value"), [("--rollout-temperature", 0.7), ("--rollout-top-p", 0.9)])
def test_own_reward_at_another_temperature_than_the_teachers_is_refused_when_it_asks(monkeypatch, flag, value):
    args = SimpleNamespace(**FIELDS | {flag[2:].replace("-", "_"): value})
    with pytest.raises(ValueError, match=f"{flag} {value} with a teacher on an engine"):
        score(monkeypatch, reply([None, -1.0, -2.0, -3.0]), args)


def test_teacher_needs_an_address(monkeypatch):
    with pytest.raises(ValueError, match="--rm-url"):
        score(monkeypatch, reply([]), SimpleNamespace(rm_url=None))


def test_rewards_are_not_compared_within_a_group():
    samples = [Sample(reward=value) for value in (0.0, 1.0, 0.0)]
    assert opd.post_process_rewards(ARGS, samples) == ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0])
