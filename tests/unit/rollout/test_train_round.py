import asyncio
import copy
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import stub_rm
from fake_engine import reply, until

from slime.rollout import train_round
from slime.rollout.data_source import create_data_source
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.scoring import mark_reward_failed
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout
from slime.utils.async_utils import run
from slime.utils.http_utils import HeldPort, HTTPStatusError
from slime.utils.types import Sample

FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters."


def indices(output):
    return [[s.index for s in group] for group in output.samples]


def row_of(payload):
    """The digit in the prompt "pN"."""
    return payload["input_ids"][1] - 24


def later_than_the_passed(args, is_late):
    """An engine that answers late prompts once the two groups of the round have passed."""
    progress = GenerateState(args).progress

    async def answer(payload):
        if is_late(row_of(payload)):
            await until(lambda: progress.snapshot()["phases"]["generate"]["done"] == 2, "two groups")
        return reply([7, 8, 9], "abc")

    return answer


def in_turn(source, outcome):
    """An engine that answers the odd prompts once those before them have come to this end."""

    async def answer(payload):
        row = row_of(payload)
        if row % 2:
            await until(lambda: source.stats()[outcome] > row // 2, f"the end of prompt {row - 1}")
        return reply([7, 8, 9], "abc")

    return answer


def test_a_round_returns_the_asked_groups_in_order(engine, make_args):
    engine.answer = lambda payload: 0.1 if row_of(payload) == 0 else reply([7, 8, 9], "abc")
    output = generate_rollout(make_args(engine), 0, create_data_source(make_args()))
    assert indices(output) == [[0, 1], [2, 3]]
    sample = output.samples[1][0]
    assert sample.status == Sample.Status.COMPLETED and sample.reward == 1.0
    assert sample.tokens[-3:] == [7, 8, 9] and sample.response_length == 3
    assert sample.token_weight_versions == ["1", "1", "1"]
    assert len(engine.requests) == 4 and output.metrics == {"rollout/reward_failed": 0}


def test_the_request_carries_ids_parameters_and_a_request_id(engine, make_args):
    generate_rollout(make_args(engine, rollout_stop=["X"]), 0, create_data_source(make_args()))
    payload = engine.requests[0]
    assert payload["return_logprob"] is True and len({p["rid"] for p in engine.requests}) == 4
    params = payload["sampling_params"]
    assert params["max_new_tokens"] == 16 and params["stop"] == ["X"] and params["no_stop_trim"] is True
    assert "spaces_between_special_tokens" not in params and "custom_params" not in params


def test_seeds_differ_by_sample_and_round_and_repeat(engine, make_args):
    def seeds(rollout_id):
        engine.requests.clear()
        generate_rollout(make_args(engine), rollout_id, create_data_source(make_args()))
        return sorted(p["sampling_params"]["sampling_seed"] for p in engine.requests)

    first, again, later = seeds(0), seeds(0), seeds(1)
    assert first == again and len(set(first)) == 4 and not set(first) & set(later)


def test_sglang_gets_seeds_only_under_deterministic_inference(engine, make_args):
    for deterministic in (False, True):
        engine.requests.clear()
        args = make_args(engine, rollout_engine="sglang", sglang_enable_deterministic_inference=deterministic)
        generate_rollout(args, 0, create_data_source(args))
        assert ("sampling_seed" in engine.requests[0]["sampling_params"]) == deterministic


def test_affinity_header_only_with_a_policy_that_honours_it(engine, make_args):
    for policy in ("round_robin", "consistent_hashing"):
        engine.headers.clear()
        args = make_args(engine, router_policy=policy)
        output = generate_rollout(args, 0, create_data_source(args))
        sent = {headers.get("X-SMG-Routing-Key") for headers in engine.headers}
        sessions = {s.session_id for group in output.samples for s in group}
        assert sent == (sessions if policy == "consistent_hashing" else {None})


def test_greedy_training_is_refused(engine, make_args):
    with pytest.raises(ValueError, match="--rollout-temperature 0 must be > 0"):
        generate_rollout(make_args(engine, rollout_temperature=0), 0, create_data_source(make_args()))


# ---- budgets -------------------------------------------------------------------------------------------------------


def test_fb_t07_a_continued_sample_asks_only_for_the_rest(engine, make_args):
    args = make_args(engine, rollout_max_response_len=10)
    sample = Sample(index=0, tokens=[1, 2], status=Sample.Status.ABORTED)
    sample.append_response_tokens(args, tokens=[5] * 7, log_probs=[0.0] * 7)
    engine.answer = lambda payload: reply([6] * payload["sampling_params"]["max_new_tokens"], finish="length")
    state_params = {"max_new_tokens": 10, "temperature": 1.0}
    run(generate(args, sample, state_params))
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 3 and sample.response_length == 10
    assert state_params["max_new_tokens"] == 10
    sample.status = Sample.Status.ABORTED
    run(generate(args, sample, state_params))
    assert sample.status == Sample.Status.TRUNCATED and len(engine.requests) == 1


def test_fb_t11_a_continuation_sends_the_stored_ids(engine, make_args):
    args = make_args(engine)
    a, b = 73, 74  # "ab" would be one id if the text were encoded again
    sample = Sample(index=0, prompt="p", tokens=[88], status=Sample.Status.ABORTED)
    sample.append_response_tokens(args, tokens=[a, b], log_probs=[-1.0, -2.0], text="ab")
    run(generate(args, sample, {"max_new_tokens": 8}))
    assert engine.requests[0]["input_ids"] == [88, a, b]
    assert sample.tokens == [88, a, b, 7, 8, 9] and sample.rollout_log_probs == [-1.0, -2.0, -0.5, -0.5, -0.5]


def test_context_limit_caps_new_tokens(engine, make_args):
    args = make_args(engine, rollout_max_context_len=6)
    generate_rollout(args, 0, create_data_source(args))
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 4


def test_finished_samples_are_not_generated_again(engine, make_args):
    with pytest.raises(ValueError, match="sample 3 is completed"):
        run(generate(make_args(engine), Sample(index=3, status=Sample.Status.COMPLETED), {"max_new_tokens": 1}))


def test_failed_samples_can_be_submitted_again(engine, make_args):
    sample = run(
        generate(make_args(engine), Sample(index=0, prompt="p", status=Sample.Status.FAILED), {"max_new_tokens": 4})
    )
    assert sample.status == Sample.Status.COMPLETED


def test_prompts_that_do_not_fit_are_replaced_counted_and_logged(engine, make_args, write_rows, caplog):
    path = write_rows([{"input": "x" * (30 if i in (0, 2) else 2)} for i in range(6)])
    args = make_args(engine, prompt_data=path, model_arch={"max_position_embeddings": 20})
    source = create_data_source(args)
    with caplog.at_level(logging.WARNING):
        output = generate_rollout(args, 0, source)
    assert [group[0].prompt for group in output.samples] == ["xx", "xx"]
    assert output.metrics["rollout/dynamic_filter/drop_prompt_too_long"] >= 1
    assert source.stats()["failed"] >= 1 and "prompt of 30 tokens leaves no room in a context of 20" in caplog.text


def test_the_engines_own_context_error_is_no_crash(engine, make_args):
    engine.answer = lambda payload: (
        (400, "input is longer than the context length") if row_of(payload) == 0 else reply([7])
    )
    output = generate_rollout(make_args(engine), 0, create_data_source(make_args()))
    assert indices(output) == [[2, 3], [4, 5]] or indices(output) == [[2, 3], [6, 7]]
    engine.answer = lambda payload: (400, "bad request")
    with pytest.raises(HTTPStatusError, match="bad request"):
        generate_rollout(make_args(engine), 0, create_data_source(make_args()))


def test_only_prompts_that_do_not_fit_end_in_an_error(engine, make_args):
    args = make_args(engine, model_arch={"max_position_embeddings": 2})
    with pytest.raises(RuntimeError, match="groups in a row were dropped and none kept.*prompt_too_long"):
        generate_rollout(args, 0, create_data_source(args))


# ---- filters, over-sampling, buffer --------------------------------------------------------------------------------


def test_filter_drops_groups_and_fetches_more(engine, make_args):
    args = make_args(engine, dynamic_sampling_filter_path="stub_rm.keep_odd_groups")
    source = create_data_source(args)
    engine.answer = in_turn(source, "filtered")
    output = generate_rollout(args, 0, source)
    assert indices(output) == [[2, 3], [6, 7]]
    assert source.stats()["filtered"] == 2 and source.stats()["in_flight"] == 2


def test_a_filter_that_drops_everything_ends_in_an_error(engine, make_args):
    args = make_args(engine, dynamic_sampling_filter_path="stub_rm.drop_all")
    with pytest.raises(RuntimeError, match="drop_never.*--dynamic-sampling-filter-path"):
        generate_rollout(args, 0, create_data_source(args))


def test_equal_rewards_are_dropped_with_their_value_as_reason(engine, make_args):
    args = make_args(engine, dynamic_sampling_filter_path=FILTERS + "check_reward_nonzero_std")
    with pytest.raises(RuntimeError, match="drop_zero_std_1.0"):
        generate_rollout(args, 0, create_data_source(args))
    args.dynamic_sampling_filter_path = FILTERS + "check_reward_nonzero_std_with_fallback"
    assert len(generate_rollout(args, 0, create_data_source(args)).samples) == 2


@pytest.mark.parametrize("value", [0.9, 0.1, 0.3, 0.5, 0.6, 0.7])
def test_fb_r13_fb_l05_a_group_without_signal_is_dropped(make_args, value):
    verdict = check_reward_nonzero_std(make_args(), [Sample(reward=value) for _ in range(8)])
    assert not verdict.keep and verdict.reason == f"zero_std_{round(value, 1)}"


def test_fb_r11_filters_use_the_reward_key_and_survive_none(make_args):
    args = make_args(reward_key="acc")
    assert check_reward_nonzero_std(
        args, [Sample(reward={"acc": 1, "len": 3}), Sample(reward={"acc": 0, "len": 9})]
    ).keep
    assert not check_reward_nonzero_std(
        args, [Sample(reward={"acc": 1, "len": 3}), Sample(reward={"acc": 1, "len": 9})]
    ).keep
    verdict = check_reward_nonzero_std_with_fallback(args, [Sample(), Sample()])
    assert (verdict.keep, verdict.reason, verdict.keep_when_insufficient) == (False, "unscored", True)


def test_filters_count_a_fan_out_once_and_keep_single_samples(make_args):
    args = make_args()
    fan_out = [[Sample(reward=1.0), Sample(reward=1.0)], [Sample(reward=0.0)]]
    assert check_reward_nonzero_std(args, fan_out).keep
    assert check_reward_nonzero_std(args, [Sample(reward=1.0)]).keep


def test_over_sampling_takes_the_first_groups_and_keeps_the_rest_for_later(engine, make_args):
    engine.answer = lambda payload: "hang" if row_of(payload) in (0, 3) else reply([7], "a")
    args = make_args(engine, over_sampling_batch_size=4)
    source = create_data_source(args)
    output = generate_rollout(args, 0, source)
    assert indices(output) == [[2, 3], [4, 5]] and engine.aborts == 1
    assert output.metrics["rollout/aborted_groups"] == 2 and source.stats()["buffered"] == 2
    engine.answer = lambda payload: reply([7], "a")
    assert indices(generate_rollout(args, 1, source)) == [[0, 1], [6, 7]]


def test_surplus_groups_are_counted_and_used_next_round(engine, make_args):
    args = make_args(engine, over_sampling_batch_size=4)
    source = create_data_source(args)
    engine.answer = later_than_the_passed(args, lambda row: row > 1)
    output = generate_rollout(args, 0, source)
    surplus = output.metrics.get("rollout/surplus_groups", 0)
    assert surplus + output.metrics.get("rollout/aborted_groups", 0) == 2 == source.stats()["buffered"]
    num_requests = len(engine.requests)
    assert indices(generate_rollout(args, 1, source)) == [[4, 5], [6, 7]]
    assert len(engine.requests) - num_requests <= 8


def test_finished_groups_from_the_buffer_cost_no_request(engine, make_args):
    args = make_args(engine)
    source = create_data_source(args)
    output = generate_rollout(args, 0, source)
    source.add_samples(output.samples)
    engine.requests.clear()
    again = generate_rollout(args, 1, source)
    assert indices(again) == [[4, 5], [6, 7]] and not engine.requests  # an off-policy training of its own
    for before, after in zip(sum(output.samples, []), sum(again.samples, []), strict=True):
        assert (after.tokens, after.rollout_log_probs, after.reward) == (
            before.tokens,
            before.rollout_log_probs,
            before.reward,
        )
        assert after.token_weight_versions == before.token_weight_versions and after.index != before.index
    assert again.metrics["rollout/oldest_group"] == 1


def test_partial_rollout_continues_from_the_stored_tokens(engine, make_args):
    engine.answer = lambda payload: {"hang": [5, 6]} if row_of(payload) == 0 else reply([7], "a", version="1")
    args = make_args(engine, over_sampling_batch_size=3, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    source = create_data_source(args)
    assert indices(generate_rollout(args, 3, source)) == [[2, 3], [4, 5]]
    waiting = source.buffer[0][0]
    assert waiting.response_length == 2 and waiting.metadata["start_rollout_id"] == 3
    engine.requests.clear()
    engine.answer = lambda payload: reply([8], "b", version="2")
    sample = generate_rollout(args, 4, source).samples[0][0]
    assert engine.requests[0]["input_ids"][-2:] == [5, 6]
    assert sample.loss_mask == [0, 0, 1] and sample.tokens[-3:] == [5, 6, 8]
    assert sample.weight_versions == ["1", "2"] and sample.token_weight_versions == ["1", "1", "2"]


def test_fb_t08_without_partial_rollout_an_aborted_sample_starts_again_from_its_prompt(engine, make_args):
    engine.answer = lambda payload: {"hang": [5, 6]} if row_of(payload) == 0 else reply([7], "a", version="2")
    args = make_args(engine, over_sampling_batch_size=3)
    source = create_data_source(args)
    generate_rollout(args, 0, source)
    waiting = source.buffer[0][0]
    assert waiting.response_length == 0 and waiting.weight_versions == [] and "start_rollout_id" not in waiting.metadata
    engine.requests.clear()
    engine.answer = lambda payload: reply([8], "b", version="4")
    sample = generate_rollout(args, 1, source).samples[0][0]
    assert len(engine.requests[0]["input_ids"]) == 2
    assert sample.token_weight_versions == ["4"] and sample.index == 0


def test_fb_a18_a_dead_engine_at_the_abort_is_a_warning(engine, make_args, caplog):
    engine.answer = lambda payload: "hang" if row_of(payload) == 0 else reply([7], "a")
    args = make_args(engine, over_sampling_batch_size=3)
    with HeldPort() as held, caplog.at_level(logging.WARNING):
        engine.extra_workers = [f"http://127.0.0.1:{held.port}"]
        output = generate_rollout(args, 0, create_data_source(args))
    assert indices(output) == [[2, 3], [4, 5]]
    assert f"engine {engine.extra_workers[0]} did not take the abort" in caplog.text


# ---- hooks ---------------------------------------------------------------------------------------------------------


def test_fb_o11_the_all_samples_hook_sees_dropped_groups_and_a_usable_source(engine, make_args):
    stub_rm.seen["all"].clear()
    args = make_args(
        engine,
        dynamic_sampling_filter_path="stub_rm.keep_odd_groups",
        rollout_all_samples_process_path="stub_rm.remember_all",
        rollout_sample_filter_path="stub_rm.remember_kept",
    )
    source = create_data_source(args)
    engine.answer = in_turn(source, "filtered")
    output = generate_rollout(args, 0, source)
    groups, given = stub_rm.seen["all"][0]
    assert [group[0].group_index for group in groups] == [0, 1, 2, 3]
    assert output.samples[0][0].remove_sample
    assert given(1)[0][0].prompt == "p4" and given.get_samples(1)[0][0].prompt == "p5"


def test_sample_hooks_run_in_order_before_the_reward(engine, make_args):
    args = make_args(engine, rollout_sample_hook_path=["stub_rm.tag_hook", "stub_rm.replace_hook"])
    sample = generate_rollout(args, 6, create_data_source(args)).samples[0][0]
    assert sample.metadata["tag"] == (6, False) and sample.label == "replaced" and sample.reward == 1.0
    args.rollout_sample_hook_path = ["stub_rm.wrong_hook"]
    with pytest.raises(TypeError, match="--rollout-sample-hook-path stub_rm.wrong_hook returned a int"):
        generate_rollout(args, 0, create_data_source(args))


# ---- rewards -------------------------------------------------------------------------------------------------------


def test_group_rm_scores_each_group_in_one_call(engine, make_args):
    stub_rm.seen["batch"].clear()
    args = make_args(engine, custom_rm_path="stub_rm.batch", group_rm=True)
    output = generate_rollout(args, 0, create_data_source(args))
    assert sorted(stub_rm.seen["batch"]) == [[0, 1], [2, 3]]
    assert all(s.reward == 2.0 for group in output.samples for s in group)


@pytest.mark.parametrize("hook", ["stub_rm.raises_on_index_1", "stub_rm.hangs_on_index_1"])
def test_a_failing_or_hanging_reward_fails_its_sample_only(engine, make_args, caplog, hook):
    args = make_args(engine, custom_rm_path=hook, rm_timeout=0.1)
    with caplog.at_level(logging.WARNING):
        output = generate_rollout(args, 0, create_data_source(args))
    bad = output.samples[0][1]
    assert (bad.status, bad.reward, bad.remove_sample) == (Sample.Status.FAILED, 0.0, True)
    assert output.metrics["rollout/reward_failed"] == 1 and "reward of sample 1 failed" in caplog.text
    assert [s.reward for s in output.samples[1]] == [1.0, 1.0]


def test_response_at_the_limit_stays_one_when_its_reward_fails(engine, make_args):
    samples = [Sample(index=0, status=Sample.Status.TRUNCATED), Sample(index=1, status=Sample.Status.COMPLETED)]
    for _ in range(2):  # a second judge fails as well
        mark_reward_failed(make_args(engine), samples, TimeoutError("slow"))
    assert [(s.status, s.is_truncated) for s in samples] == [
        (Sample.Status.FAILED, True),
        (Sample.Status.FAILED, False),
    ]
    samples[0].reset_response()
    assert not samples[0].is_truncated


def test_plain_rewards_that_hang_take_nothing_from_the_later_ones(engine, make_args):
    args = make_args(engine, custom_rm_path="stub_rm.plain_hangs_on_group_0", n_samples_per_prompt=40, rm_timeout=1.0)
    output = generate_rollout(args, 0, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == 40
    assert [s.reward for s in output.samples[1]] == [1.0] * 40
    args.custom_rm_path, args.rm_timeout = "stub_rm.plain_one", 60.0
    output = generate_rollout(args, 1, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == 0


def test_time_in_the_queue_of_plain_rewards_does_not_count(engine, make_args, monkeypatch):
    monkeypatch.setattr("slime.rollout.generate_state.NUM_PLAIN_REWARDS", 1)
    args = make_args(engine, custom_rm_path="stub_rm.plain_slow", n_samples_per_prompt=8, rm_timeout=1.5)
    output = generate_rollout(args, 0, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == 0  # 1.6 seconds in all


@pytest.mark.parametrize("hook", ["stub_rm.exits_on_index_1", "stub_rm.plain_exits_on_index_1"])
def test_a_reward_that_exits_fails_its_sample_only(engine, make_args, hook):
    args = make_args(engine, custom_rm_path=hook)
    output = generate_rollout(args, 0, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == 1
    assert "SystemExit(3)" in output.samples[0][1].metadata["reward_error"]


def test_rewards_that_are_no_finite_number_fail_and_scalars_of_libraries_are_plain_numbers(engine, make_args):
    args = make_args(engine, custom_rm_path="stub_rm.odd_values", n_samples_per_prompt=5)
    output = generate_rollout(args, 0, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == 5
    assert [(type(s.reward), s.reward) for s in output.samples[1]] == [(float, 0.5)] * 2 + [(float, 1.0)] * 2 + [
        (int, 2)
    ]


def test_nonsense_of_every_kind_fails_its_sample_and_is_counted(engine, make_args):
    args = make_args(
        engine, custom_rm_path="stub_rm.nonsense", n_samples_per_prompt=stub_rm.NUM_NONSENSE, reward_key="score"
    )
    output = generate_rollout(args, 0, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == stub_rm.NUM_NONSENSE
    for sample in output.samples[0]:
        assert (sample.status, sample.reward, sample.remove_sample) == (Sample.Status.FAILED, {"score": 0.0}, True)
        assert sample.metadata["reward_error"]
    assert all(sample.reward == {"score": 1.0} for sample in output.samples[1])


def test_group_judge_that_returns_no_list_of_rewards_fails_its_group_only(engine, make_args):
    args = make_args(engine, custom_rm_path="stub_rm.group_nonsense", group_rm=True, rollout_batch_size=9)
    output = generate_rollout(args, 0, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == 8 * 2
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 0.0]] * 8 + [[0, 1]]


def test_group_judge_may_ask_engines_and_one_that_hangs_fails_its_group_only(engine, make_args, caplog):
    judge = dict(custom_rm_path="stub_rm.slow_group_0_and_engine_call", group_rm=True, rm_timeout=2.0)
    runs = [make_args(engine, n_samples_per_prompt=size, **judge) for size in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:  # they hang side by side
        outputs = list(pool.map(lambda args: generate_rollout(args, 0, create_data_source(args)), runs))
    for size, output in zip((1, 2, 3), outputs, strict=True):
        assert [[s.reward for s in group] for group in output.samples] == [[0.0] * size, [1.0] * size]
        assert output.metrics["rollout/reward_failed"] == size
        names = ", ".join(map(str, range(size)))
        assert f"reward of sample {names} failed: TimeoutError: no reward within --rm-timeout 2.0 s" in caplog.text


def test_group_rm_with_a_judge_of_single_samples_fails_one_sample_not_its_group(engine, make_args):
    args = make_args(engine, custom_rm_path="stub_rm.raises_on_index_1", group_rm=True)
    output = generate_rollout(args, 0, create_data_source(args))
    assert [[s.reward for s in group] for group in output.samples] == [[1.0, 0.0], [1.0, 1.0]]


def test_dict_reward_without_a_key_is_an_error_that_names_the_flag(engine, make_args):
    args = make_args(engine, custom_rm_path="stub_rm.scores")
    with pytest.raises(RuntimeError, match="dict of .'score', 'acc'.: give --reward-key"):
        generate_rollout(args, 0, create_data_source(args))
    for flag in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        hooked = make_args(engine, custom_rm_path="stub_rm.scores", **{flag: "stub_rm.one"})
        output = generate_rollout(hooked, 0, create_data_source(hooked))
        assert output.samples[0][0].reward == {"score": 1.0, "acc": True}


def test_many_failing_rewards_are_counted_not_listed(engine, make_args, caplog):
    args = make_args(engine, custom_rm_path="stub_rm.raises_on_group_0", n_samples_per_prompt=16)
    with caplog.at_level(logging.WARNING):
        output = generate_rollout(args, 0, create_data_source(args))
    assert output.metrics["rollout/reward_failed"] == 16
    assert caplog.text.count("reward of sample") == 5 and "16 rewards failed" in caplog.text
    assert len(caplog.records) == 7


def test_a_round_whose_rewards_all_fail_raises_with_the_first_traceback(engine, make_args):
    args = make_args(engine, custom_rm_path="stub_rm.always_raises")
    with pytest.raises(RuntimeError, match=r"(?s)the reward of all 4 samples failed.*always_raises.*KeyError: 'judge'"):
        generate_rollout(args, 0, create_data_source(args))


def test_fb_r11_dict_and_none_rewards(engine, make_args):
    args = make_args(engine, custom_rm_path="stub_rm.dict_or_none", reward_key="acc")
    output = generate_rollout(args, 0, create_data_source(args))
    assert [s.get_reward_value(args) for s in output.samples[0]] == [0, 1]
    assert [s.get_reward_value(args) for s in output.samples[1]] == [0.0, 0.0]
    assert output.metrics["rollout/reward_failed"] == 2


def test_fb_r14_a_slow_judge_of_surplus_groups_does_not_block_the_round(engine, make_args):
    args = make_args(
        engine, custom_rm_path="stub_rm.slow_for_late_groups", over_sampling_batch_size=3, rm_timeout=600.0
    )
    source = create_data_source(args)
    started = time.monotonic()
    output = generate_rollout(args, 0, source)
    assert time.monotonic() - started < 300 and indices(output) == [[0, 1], [2, 3]]
    assert source.buffer[0][0].reward is None
    args.custom_rm_path = "stub_rm.one"
    engine.requests.clear()
    assert indices(generate_rollout(args, 1, source))[0] == [4, 5]
    assert all(row_of(payload) != 2 for payload in engine.requests)


# ---- failures ------------------------------------------------------------------------------------------------------


def test_fb_r15_one_failing_sample_cancels_its_siblings_and_the_next_round_works(engine, make_args):
    second = iter([False, True])
    engine.answer = lambda payload: 500 if next(second, False) else "hang"
    args = make_args(engine, rollout_batch_size=3)
    source = create_data_source(args)
    started = time.monotonic()
    with pytest.raises(HTTPStatusError, match="answered 500"):
        generate_rollout(args, 0, source)
    assert time.monotonic() - started < 100  # the siblings did not run into their deadline of 120 s

    async def look():
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        return GenerateState(args), others

    state, others = run(look())
    assert not others and not state.pendings and state.remaining_batch_size == 0 and not state.aborted
    engine.answer = lambda payload: reply([7])
    assert len(generate_rollout(args, 1, source).samples) == 3


def test_no_engine_is_a_clear_error_within_the_deadline(make_args):
    with HeldPort() as held:
        args = make_args(sglang_router_port=held.port, sglang_router_request_timeout_secs=0.3)
        with pytest.raises(RuntimeError, match=r"POST http://127.0.0.1:\d+/generate failed.*budget 0.3 s.*last: "):
            generate_rollout(args, 0, create_data_source(args))


def test_an_exhausted_source_is_a_clear_error(engine, make_args):
    class Empty:
        def get_samples(self, n):
            return []

    with pytest.raises(RuntimeError, match="no more prompts after 0 of 2 groups"):
        generate_rollout(make_args(engine), 0, Empty())


def test_copies_of_args_that_a_hook_makes_have_the_state_of_their_original(engine, make_args):
    args = make_args(engine)
    state = GenerateState(args)
    own = copy.deepcopy(args)
    own.max_turns = 3
    assert GenerateState(own) is state and GenerateState(copy.copy(args)) is state


def test_state_is_one_object_per_args_and_loop_with_a_shared_progress(engine, make_args):
    args = make_args(engine)

    async def inside():
        return GenerateState(args)

    outside = GenerateState(args)
    assert outside is run(inside()) and outside is not asyncio.run(inside())
    assert GenerateState(make_args(engine)) is not outside
    generate_rollout(args, 0, create_data_source(args))
    phase = outside.progress.snapshot()["phases"]["generate"]
    assert (phase["done"], phase["total"]) == (2, 2)
    assert phase["counters"] == {"tokens": 12, "reward_sum": 4.0, "rewards": 4}


def test_prompts_of_a_failed_round_are_served_again(engine, make_args):
    engine.answer = lambda payload: 500 if row_of(payload) == 1 else reply([7])
    args = make_args(engine)
    source = create_data_source(args)
    with pytest.raises(HTTPStatusError):
        generate_rollout(args, 0, source)
    engine.answer = lambda payload: reply([7])
    assert indices(generate_rollout(args, 0, source)) == [[0, 1], [2, 3]]


_go_on, _has_written = threading.Event(), threading.Semaphore(0)


def slow_to_stop(args, sample, sampling_params):
    """A plain function, whose thread nobody can end, on prompt 1; it ends long after its round."""
    if sample.group_index == 1:
        assert _go_on.wait(60)
    sample.response = "ab"
    _has_written.release()
    return sample


def test_a_function_that_outlives_its_round_does_not_write_into_what_waits_for_the_next_one(
    engine, make_args, monkeypatch
):
    monkeypatch.setattr(train_round, "ABORT_GRACE_S", 0.1)
    hook = f"{__name__}.slow_to_stop"
    args = make_args(engine, custom_generate_function_path=hook, rollout_batch_size=1, over_sampling_batch_size=2)
    source = create_data_source(args)
    (kept,) = generate_rollout(args, 0, source).samples
    (waiting,) = source.buffer
    _go_on.set()
    for _ in range(4):
        assert _has_written.acquire(timeout=60)
    assert [sample.response for sample in (*kept, *waiting)] == ["ab", "ab", "", ""]
