import pytest
from fake_engine import reply

from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.eval_config import EvalDatasetConfig


@pytest.fixture
def dataset(write_rows):
    path = write_rows([{"input": f"p{i}"} for i in range(3)], "eval.jsonl")

    def make(**overrides):
        values = dict(
            name="set", path=path, n_samples_per_eval_prompt=2, temperature=0.0, top_p=1.0, top_k=-1, max_response_len=8,
            input_key="input", tool_key="tools", metadata_key="metadata", apply_chat_template=False,
            custom_rm_path="stub_rm.by_index",
        )  # fmt: skip
        return EvalDatasetConfig(**{**values, **overrides})

    return make


def evaluate(args):
    return generate_rollout(args, 0, None, evaluation=True).data


def test_results_are_in_order_whatever_finishes_first(engine, make_args, dataset):
    engine.answer = lambda payload: 0.1 if payload["input_ids"][1] == 24 else reply([7], "a", finish="length")
    data = evaluate(make_args(engine, eval_datasets=[dataset()]))["set"]
    assert [s.index for s in data["samples"]] == list(range(6))
    assert data["rewards"] == [0.0, 1.0] * 3 and data["truncated"] == [False, False] + [True] * 4


def test_each_request_has_its_own_parameters(engine, make_args, dataset):
    args = make_args(engine, eval_datasets=[dataset(stop=["###"], min_new_tokens=2, repetition_penalty=1.1)])
    evaluate(args)
    sent = [request["sampling_params"] for request in engine.requests]
    assert all(p["max_new_tokens"] == 8 and p["temperature"] == 0.0 and p["stop"] == ["###"] for p in sent)
    assert all(p["min_new_tokens"] == 2 and p["repetition_penalty"] == 1.1 for p in sent)
    seeds = sorted(p["sampling_seed"] for p in sent)
    engine.requests.clear()
    evaluate(args)
    assert len(set(seeds)) == 6 and sorted(p["sampling_params"]["sampling_seed"] for p in engine.requests) == seeds


def test_data_sets_have_their_own_rewards_metadata_and_generators(engine, make_args, dataset):
    sets = [
        dataset(name="a", metadata_overrides={"level": {"n": 2}}, rm_type="math"),
        dataset(
            name="b", custom_rm_path="stub_rm.one", custom_generate_function_path="agent_hooks.upstream_with_evaluation"
        ),
    ]
    data = evaluate(make_args(engine, eval_datasets=sets))
    assert data["a"]["samples"][0].metadata == {"level": {"n": 2}, "rm_type": "math"}
    assert data["a"]["samples"][0].metadata["level"] is not data["a"]["samples"][1].metadata["level"]
    assert data["b"]["rewards"] == [1.0] * 6 and data["b"]["samples"][0].metadata["evaluation"] is True


def test_list_form_generate_is_called_per_prompt(engine, make_args, dataset):
    import agent_hooks

    agent_hooks.calls.clear()
    args = make_args(engine, eval_datasets=[dataset()], custom_generate_function_path="agent_hooks.from_text")
    assert len(evaluate(args)["set"]["samples"]) == 6


def test_a_failing_reward_is_nan_which_can_be_rounded_and_the_eval_key_wins(engine, make_args, dataset):
    args = make_args(engine, eval_datasets=[dataset(custom_rm_path="stub_rm.raises_on_index_1")])
    assert [str(round(reward, 1)) for reward in evaluate(args)["set"]["rewards"]] == ["1.0", "nan", *["1.0"] * 4]
    args = make_args(engine, eval_datasets=[dataset(custom_rm_path="stub_rm.dict_or_none")], eval_reward_key="len")
    assert [str(reward) for reward in evaluate(args)["set"]["rewards"]] == ["3", "3", "nan", "nan", "3", "3"]


def test_failed_rewards_of_an_evaluation_are_counted(engine, make_args, dataset):
    args = make_args(engine, eval_datasets=[dataset(custom_rm_path="stub_rm.raises_on_index_1")])
    for _ in range(2):  # each evaluation counts its own
        assert generate_rollout(args, 0, None, evaluation=True).metrics == {"eval/reward_failed": 1}


def test_group_rewards_are_refused(engine, make_args, dataset):
    with pytest.raises(ValueError, match="--group-rm is not supported in evaluation"):
        evaluate(make_args(engine, eval_datasets=[dataset()], group_rm=True))


def test_a_prompt_that_does_not_fit_counts_zero(engine, make_args, dataset):
    args = make_args(engine, eval_datasets=[dataset()], eval_max_context_len=2)
    data = evaluate(args)["set"]
    assert data["rewards"] == [0.0] * 6 and not engine.requests


def test_sets_with_plain_and_dict_rewards_stand_side_by_side(engine, make_args, dataset):
    sets = [dataset(name="dict", custom_rm_path="stub_rm.dict_or_none"), dataset(name="plain")]
    data = evaluate(make_args(engine, eval_datasets=sets, eval_reward_key="acc", reward_key="acc"))
    assert data["plain"]["rewards"] == [0.0, 1.0] * 3
    assert data["dict"]["rewards"][:2] == [0, 1]


def test_requests_of_an_evaluation_carry_their_affinity_key(engine, make_args, dataset):
    evaluate(make_args(engine, eval_datasets=[dataset()], router_policy="consistent_hashing"))
    assert len({headers["X-SMG-Routing-Key"] for headers in engine.headers}) == 6


def late(number, answer):
    """An engine that keeps the prompt of this number waiting."""
    return lambda payload: answer if payload["input_ids"][1] == 24 + number else reply([7], "a")


def test_the_last_slow_samples_are_given_up_when_a_set_says_so(engine, make_args, dataset):
    engine.answer = late(2, "hang")
    early = dict(eval_early_stop_remaining=3, eval_early_stop_idle_timeout=0.2, custom_rm_path="stub_rm.one")
    args = make_args(engine, eval_datasets=[dataset(**early), dataset(name="other", max_response_len=4, **early)])
    data = evaluate(args)
    for result in data.values():
        assert result["rewards"] == [1.0] * 4 and result["unfinished"] == 2
        assert [sample.index for sample in result["samples"]] == [0, 1, 2, 3]


def test_an_early_stop_waits_for_the_samples_that_a_set_needs(engine, make_args, dataset):
    engine.answer = late(2, 0.5)
    early = dict(eval_early_stop_remaining=3, eval_early_stop_idle_timeout=0.05, min_eval_samples=5)
    result = evaluate(make_args(engine, eval_datasets=[dataset(**early)]))["set"]
    assert len(result["rewards"]) >= 5


def test_sets_are_read_at_the_start_and_bad_ones_named(engine, make_args, dataset, write_rows):
    from slime.rollout.eval_rollout import read_eval_sets

    path = write_rows([{"input": "a"}, {"question": "b"}], "bad.jsonl")
    with pytest.raises(ValueError, match="evaluation set bad: .*bad.jsonl:2: no key 'input'"):
        read_eval_sets(make_args(engine, eval_datasets=[dataset(), dataset(name="bad", path=path)]))
    with pytest.raises(ValueError, match="evaluation set small: 6 samples, min_eval_samples is 7"):
        read_eval_sets(make_args(engine, eval_datasets=[dataset(name="small", min_eval_samples=7)]))


def test_hooks_of_a_set_are_looked_up_at_the_start(engine, make_args, dataset):
    from slime.rollout.hooks import check_rollout_hooks

    args = make_args(
        engine, rollout_function_path="slime.rollout.sglang_rollout.generate_rollout", custom_rollout_log_function_path=None,
        eval_function_path="slime.rollout.sglang_rollout.generate_rollout", custom_eval_rollout_log_function_path=None,
        custom_convert_samples_to_train_data_path=None, eval_datasets=[dataset(custom_rm_path="stub_rm.nowhere")],
    )  # fmt: skip
    with pytest.raises(ValueError, match="evaluation set set: --custom-rm-path: 'stub_rm.nowhere'"):
        check_rollout_hooks(args)


def test_a_least_length_never_exceeds_the_room_that_is_left(engine, make_args, dataset):
    sets = [dataset(min_new_tokens=6, n_samples_per_eval_prompt=1)]
    evaluate(make_args(engine, eval_datasets=sets, eval_max_context_len=5))
    sent = [request["sampling_params"] for request in engine.requests]
    assert sent and all(params["max_new_tokens"] == params["min_new_tokens"] == 3 for params in sent)
