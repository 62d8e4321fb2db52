"""Every engine call of a custom generate function draws numbers of its own, the same ones when the round is repeated."""

from types import SimpleNamespace

import pytest

from slime.rollout.call_seeds import CallSeeds
from slime.rollout.data_source import create_data_source
from slime.rollout.sglang_rollout import generate_rollout


@pytest.fixture
def seeds_of(engine, make_args):
    """`seeds_of(hook, **flags)`: ([(prompt ids, seed) of every request], the round's samples)."""

    def run(hook, **overrides):
        engine.requests.clear()
        path = hook if hook is None or "." in hook else f"agent_hooks.{hook}"
        args = make_args(engine, custom_generate_function_path=path, **overrides)
        groups = generate_rollout(args, 0, create_data_source(args)).samples
        asked = [(p["input_ids"], p["sampling_params"].get("sampling_seed")) for p in engine.requests]
        return sorted(asked, key=repr), [sample for group in groups for sample in group]

    return run


def test_calls_of_one_function_differ_and_repeat_with_the_round(seeds_of):
    asked, samples = seeds_of("asks_itself_in_parallel")
    assert len(asked) == 4 * len(samples) and len({seed for _, seed in asked}) == len(asked)
    assert seeds_of("asks_itself_in_parallel")[0] == asked


def test_the_first_call_draws_what_the_built_in_generator_draws(seeds_of):
    alone = {seed for _, seed in seeds_of(None, group_requests="never")[0]}
    assert {seed for _, seed in seeds_of("upstream")[0]} == alone
    assert alone < {seed for _, seed in seeds_of("asks_itself_in_parallel")[0]}


def test_parameters_hold_a_seed_only_where_an_engine_needs_one(seeds_of):
    """Requests that other HTTP clients make with the parameters are then as independent as the engine's own seeds."""
    assert all("sampling_seed" not in sample.metadata["params"] for sample in seeds_of("asks_itself_in_parallel")[1])
    asked, samples = seeds_of("asks_itself_in_parallel", sglang_enable_deterministic_inference=True)
    assert len({sample.metadata["params"]["sampling_seed"] for sample in samples}) == len(samples)
    assert len({seed for _, seed in asked}) == len(asked)


def test_a_seed_that_the_function_chooses_is_sent(seeds_of):
    assert {seed for _, seed in seeds_of("chooses_its_own_seed")[0]} == {5}


def test_conversations_side_by_side_are_conversations_of_their_own(engine, seeds_of, write_rows):
    messages = [{"role": "user", "content": "hi"}]
    asked, samples = seeds_of("converses_in_parallel", prompt_data=write_rows([{"input": messages, "label": "1"}] * 3))
    assert len({seed for _, seed in asked}) == len(asked) == 3 * len(samples)
    assert len({tuple(ids) for ids, _ in asked}) == 1
    prompt = asked[0][0]
    assert all(sample.tokens == [*prompt, *sample.tokens[len(prompt) :]] for sample in samples)
    assert all(sum(sample.loss_mask) == sample.response_length for sample in samples)


def test_everything_that_can_be_posted_has_a_seed():
    seeds = CallSeeds(SimpleNamespace(rollout_seed=1))
    assert len({seeds.of_call(prompt) for prompt in ([1, 2], "half \ud800", ["a", "b"], None, None)}) == 5
