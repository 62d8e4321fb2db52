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
        dataset(name="a", metadata_overrides={"level": 2}, rm_type="math"),
        dataset(
            name="b", custom_rm_path="stub_rm.one", custom_generate_function_path="agent_hooks.upstream_with_evaluation"
        ),
    ]
    data = evaluate(make_args(engine, eval_datasets=sets))
    assert data["a"]["samples"][0].metadata == {"level": 2, "rm_type": "math"}
    assert data["b"]["rewards"] == [1.0] * 6 and data["b"]["samples"][0].metadata["evaluation"] is True


def test_list_form_generate_is_called_per_prompt(engine, make_args, dataset):
    import agent_hooks

    agent_hooks.calls.clear()
    args = make_args(engine, eval_datasets=[dataset()], custom_generate_function_path="agent_hooks.from_text")
    assert len(evaluate(args)["set"]["samples"]) == 6


def test_a_failing_reward_counts_zero_and_the_eval_key_wins(engine, make_args, dataset):
    args = make_args(engine, eval_datasets=[dataset(custom_rm_path="stub_rm.raises_on_index_1")])
    assert evaluate(args)["set"]["rewards"] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    args = make_args(engine, eval_datasets=[dataset(custom_rm_path="stub_rm.dict_or_none")], eval_reward_key="len")
    assert evaluate(args)["set"]["rewards"] == [3, 3, 0.0, 0.0, 3, 3]


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
