"""One engine call for the samples of a prompt (`--group-requests`): what it asks, and when it is not used."""

import pytest
from fake_engine import reply

from slime.rollout.data_source import create_data_source
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.types import Sample


def run_round(args, rollout_id=0):
    return generate_rollout(args, rollout_id, create_data_source(args))


def test_a_group_is_one_request_whose_seeds_count_up_from_the_first_samples_own(engine, make_args):
    alone = make_args(engine)
    run_round(alone, 3)
    seeds = sorted(p["sampling_params"]["sampling_seed"] for p in engine.requests)
    engine.requests.clear()
    output = run_round(make_args(engine, group_requests="auto"), 3)
    params = [p["sampling_params"] for p in engine.requests]
    assert [p["n"] for p in params] == [2, 2]
    assert sorted(p["sampling_seed"] + i for p in params for i in range(2)) == seeds
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3]]


def test_every_sample_gets_its_own_answer_and_its_own_state(engine, make_args):
    engine.answer = lambda payload: [reply([7, 8], "ab"), reply([9], "c", finish="length")]
    first, second = run_round(make_args(engine, group_requests="auto")).samples[0]
    assert (first.tokens[-2:], first.status, first.response) == ([7, 8], Sample.Status.COMPLETED, "ab")
    assert (second.tokens[-1:], second.status, second.response) == ([9], Sample.Status.TRUNCATED, "c")
    assert first.tokens is not second.tokens and first.trace is not second.trace
    spans = [event["name"] for event in second.trace["events"] if event["type"] == "span_end"]
    assert spans.count("sglang_generate") == 1 and "reward_model" in spans and first.reward == second.reward == 1.0


def test_a_prompt_that_the_engine_finds_too_long_drops_the_group(engine, make_args):
    engine.answer = lambda payload: (
        (400, "longer than the context length") if payload["input_ids"][1] == 24 else reply([7])
    )
    output = run_round(make_args(engine, group_requests="auto"))
    assert output.metrics["rollout/dynamic_filter/drop_prompt_too_long"] == 1
    assert 0 not in [group[0].index for group in output.samples]


def test_a_wrong_number_of_answers_ends_the_round(engine, make_args):
    engine.answer = lambda payload: [reply([7])]
    with pytest.raises(RuntimeError, match="gave 1 answers to a request for 2"):
        run_round(make_args(engine, group_requests="auto"))


def test_aborted_samples_keep_what_they_had_and_go_on_alone(engine, make_args):
    engine.answer = lambda payload: (
        [reply([5, 6], finish="abort"), reply([4], finish="abort")]
        if payload["input_ids"][1] == 24
        else reply([7], "a")
    )
    args = make_args(engine, group_requests="auto", partial_rollout=True, rollout_batch_size=1)
    source = create_data_source(args)
    engine.requests.clear()

    def later(payload):
        return reply([8], "b")

    answers = engine.answer
    engine.answer = lambda payload: later(payload) if payload["input_ids"][-1] in (4, 6) else answers(payload)
    output = generate_rollout(args, 0, source)
    assert [s.tokens[-2:] for s in output.samples[0]] == [[6, 8], [4, 8]] or output.samples[0][0].index == 2
    continued = [p for p in engine.requests if p["input_ids"][-1] in (4, 6)]
    assert len(continued) in (0, 2) and all("n" not in p["sampling_params"] for p in continued)


def test_groups_wait_for_as_many_permits_as_they_have_samples(engine, make_args):
    engine.answer = lambda payload: 0.02
    args = make_args(engine, group_requests="auto", sglang_server_concurrency=3, rollout_batch_size=4)
    output = run_round(args)
    assert len(output.samples) == 4
    assert GenerateState(args).semaphore._value == 3 and len(engine.requests) == 4


@pytest.mark.parametrize(
    "overrides",
    [
        {"group_requests": "never"},
        {"rollout_max_response_len": 513},
        {"sglang_server_concurrency": 1},
        {"router_policy": "consistent_hashing"},
        {"use_rollout_routing_replay": True},
        {"rollout_engine": "sglang"},
        {"rollout_engine": "sglang", "group_requests": "always", "sglang_enable_deterministic_inference": True},
    ],
    ids=str,
)
def test_samples_are_asked_for_alone_where_one_call_could_not_stand_for_them(engine, make_args, overrides):
    run_round(make_args(engine, **{"group_requests": "auto", **overrides}))
    assert len(engine.requests) == 4 and all("n" not in p["sampling_params"] for p in engine.requests)


def test_always_serves_long_responses_and_sglang_without_seeds(engine, make_args):
    run_round(make_args(engine, group_requests="always", rollout_engine="sglang", rollout_max_response_len=2000))
    assert [p["sampling_params"]["n"] for p in engine.requests] == [2, 2]
    assert "sampling_seed" not in engine.requests[0]["sampling_params"]
