"""Each file of examples/hooks does what it says, against a stand-in for the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import reply

from slime.batching.convert import post_process_rewards
from slime.rollout.data_source import create_data_source
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run
from slime.utils.misc import load_function, load_hook
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

HOOKS = Path(__file__).resolve().parents[3] / "examples" / "hooks"
CHAT = [{"role": "user", "content": "hi"}]


def hook(name: str) -> str:
    return str(HOOKS / name)


def sample(response: str = "", **fields) -> Sample:
    fields = {"index": 0, "group_index": 0, "status": Sample.Status.COMPLETED, **fields}
    return Sample(response=response, response_length=len(response), tokens=[0] * (len(response) + 1), **fields)


@pytest.fixture
def one_group(engine, make_args, write_rows):
    """``one_group(prompt, **flags)`` generates the two samples of one prompt."""

    def generate(prompt, **flags) -> list[Sample]:
        data = write_rows([{"input": prompt, "label": "1"}])
        args = make_args(engine, prompt_data=data, rollout_batch_size=1, rollout_max_response_len=200, **flags)
        return generate_rollout(args, 0, create_data_source(args)).samples[0]

    return generate


def test_reward_function(make_args):
    args = make_args(custom_rm_path=hook("reward_function.py"))
    assert run(async_rm(args, sample("it is 42", label="42"))) == pytest.approx(1 - 0.08)
    assert run(async_rm(args, sample("no", label="42"))) == pytest.approx(-0.02)


def test_reward_of_a_group(make_args):
    args = make_args(custom_rm_path=hook("reward_group.py"), group_rm=True)
    samples = [sample("long text", index=0), sample("short", index=1), sample("", index=2)]
    assert run(batched_async_rm(args, samples)) == [0, 0.5, 1]


@pytest.mark.parametrize("num_players", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_fb_a26_tournament_lets_the_best_win_whatever_the_number(num_players):
    """Players are seeded by their strength; those of the lowest number have the bye."""
    matches = []

    async def beats(a, b):
        matches.append((a + 1, b + 1))
        return a < b

    ranks = run(load_function(hook("reward_tournament.py:tournament"))(num_players, beats))
    assert ranks[0] == 0 and ranks.count(0) == 1 and len(matches) == num_players - 1
    if num_players == 6:
        assert matches[:2] == [(3, 6), (4, 5)]  # 1 and 2 have a bye
        assert ranks == [0, 1, 2, 2, 3, 3]


def test_fb_a26_rewards_of_a_tournament_add_up_to_zero(make_args):
    args = make_args(custom_rm_path=hook("reward_tournament.py"), group_rm=True)
    samples = [sample(text, index=i) for i, text in enumerate(["1", "long 12 3456", "22", "nothing", "a 123", "xy"])]
    rewards = run(batched_async_rm(args, samples))
    assert rewards.index(max(rewards)) == 1 and sum(rewards) == pytest.approx(0)
    assert run(batched_async_rm(args, samples[:1])) == [0]


def test_reward_class(make_args):
    args = make_args(custom_rm_path=hook("reward_class.py"), rm_model_path="judge")
    assert run(batched_async_rm(args, [sample("abc "), sample("1")])) == [0.75, 0]


def test_generate_for_one_sample(engine, one_group):
    one_group("short", custom_generate_function_path=hook("generate_sample.py"))
    one_group("a prompt of many characters", custom_generate_function_path=hook("generate_sample.py"))
    assert [r["sampling_params"]["temperature"] for r in engine.requests] == [0.8, 0.8, 1.2, 1.2]


def test_conversation_trains_what_was_sampled_and_masks_what_was_added(engine, one_group):
    first, _ = one_group(CHAT, custom_generate_function_path=hook("generate_conversation.py"), max_turns=2)
    trained = [t for t, m in zip(first.tokens[-first.response_length :], first.loss_mask, strict=True) if m]
    assert trained == [7, 8, 9, 7, 8, 9] and first.loss_mask.count(0) > 0
    assert len(first.weight_versions) == 2 and first.response == "abc"


def test_tool_text_is_in_the_context_and_out_of_the_loss(engine, one_group, tokenizer_dir):
    first, _ = one_group("hi", custom_generate_function_path=hook("multi_turn_tool.py"), max_turns=2)
    tool = load_tokenizer(tokenizer_dir).encode("\n[3 characters]\n", add_special_tokens=False)
    assert first.tokens[-first.response_length :] == [7, 8, 9, *tool, 7, 8, 9]
    assert first.loss_mask == [1] * 3 + [0] * len(tool) + [1] * 3
    assert first.rollout_log_probs == [-0.5] * 3 + [0.0] * len(tool) + [-0.5] * 3
    assert first.response == "abc\n[3 characters]\nabc" and first.status == Sample.Status.COMPLETED


def test_tool_loop_ends_at_the_response_limit(engine, make_args, write_rows):
    engine.answer = lambda payload: reply([7] * payload["sampling_params"]["max_new_tokens"], "x", "length")
    args = make_args(
        engine,
        prompt_data=write_rows([{"input": "hi", "label": "1"}]),
        rollout_batch_size=1,
        custom_generate_function_path=hook("multi_turn_tool.py"),
        max_turns=3,
    )
    first = generate_rollout(args, 0, create_data_source(args)).samples[0][0]
    assert first.status == Sample.Status.TRUNCATED and sum(first.loss_mask) == 16


def test_dynamic_filter(make_args):
    keep = load_hook(hook("filters.py:keep_mixed"), "dynamic_sampling_filter_path")
    args = make_args()
    assert call_dynamic_filter(keep, args, [sample(reward=0.0), sample(reward=1.0)]).keep
    verdict = call_dynamic_filter(keep, args, [sample(reward=1.0), sample(reward=1.0)])
    assert (verdict.keep, verdict.reason) == (False, "all_1.0")


def test_buffer_filter_hands_out_the_newest_groups_first(make_args):
    source = create_data_source(make_args(buffer_filter_path=hook("filters.py:newest_first")))
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert [group[0].group_index for group in source.get_samples(2)] == [2, 1]
    assert [group[0].group_index for group in source.get_samples(2)] == [0, 3]


def test_sample_filter_keeps_truncated_samples_out_of_the_loss(make_args):
    cut, whole = sample("a", status=Sample.Status.TRUNCATED), sample("b")
    load_function(hook("filters.py:drop_truncated"))(make_args(), [[cut, whole]])
    assert (cut.remove_sample, whole.remove_sample) == (True, False)


def test_sample_hook_runs_before_the_reward(engine, one_group):
    engine.answer = lambda payload: reply([7, 8], "thinking. Answer: 1")
    flags = {
        "rollout_sample_hook_path": [hook("sample_hook.py:strip_answer")],
        "custom_rm_path": hook("reward_function.py"),
    }
    first, _ = one_group("hi", **flags)
    assert first.response == "1" and first.reward == pytest.approx(0.98)
    assert first.metadata["full_response"] == "thinking. Answer: 1"


def test_data_source_goes_on_where_it_stopped(make_args):
    args = make_args(data_source_path=hook("data_source.py"), label_key="label", input_key="prompt")
    source, resumed = create_data_source(args), create_data_source(args)
    before = source.get_samples(3)
    assert [len(group) for group in before] == [2, 2, 2] and before[0][0].label
    source.mark_finished(before[:2])
    resumed.load_state_dict(source.state_dict())
    again, fresh = resumed.get_samples(2)
    assert again[0].prompt == before[2][0].prompt  # it was in flight
    assert fresh[0].prompt == source.get_samples(1)[0][0].prompt


def test_reward_post_process(make_args):
    args = make_args(custom_reward_post_process_path=hook("reward_post_process.py:minus_group_mean"))
    samples = [sample(reward=r, group_index=g) for r, g in ((1.0, 0), (0.0, 0), (5.0, 1))]
    assert post_process_rewards(args, samples) == ([1, 0, 5], [0.5, -0.5, 0])
