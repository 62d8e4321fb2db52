"""How a round is over-provisioned and ended: the age limit, and policies of users."""

import copy

import pytest
from fake_engine import reply, until

from slime.rollout.data_source import create_data_source
from slime.rollout.ledger_check import check
from slime.rollout.round_policy import RoundPolicy, create_policy
from slime.rollout.sglang_rollout import GenerateState, generate_rollout

DROPPING = "slime.rollout.round_policy.DropOldGroups"


def row_of(payload):
    """The digit in the prompt "pN"."""
    return payload["input_ids"][1] - 24


def rows(output):
    return [group[0].data_row for group in output.samples]


class SlowRow:
    """Row 0 gives two tokens a round and hangs; after `rounds` of them it ends 0.2 s after the others, which ask later than it."""

    def __init__(self, rounds):
        self.left, self.asked = 2 * rounds, 0  # two samples

    async def __call__(self, payload):
        if row_of(payload) != 0:
            await until(lambda: self.asked >= 2, "the requests of row 0")
            return reply([7], "a")
        self.asked += 1
        self.left -= 1
        return {"hang": [5, 6]} if self.left >= 0 else 0.2


def three_rounds(engine, make_args, **overrides):
    args = make_args(engine, over_sampling_batch_size=3, partial_rollout=True, **overrides)
    source = create_data_source(args)
    outputs = []
    for rollout_id in range(3):
        engine.answer.asked = 0 if rollout_id < 2 else 2  # in the last round row 0 may be done or dropped
        outputs.append(generate_rollout(args, rollout_id, source))
        source.mark_finished(outputs[-1].samples)
        assert check(source.state_dict()).problems == []
    return outputs, source


def test_a_round_waits_for_a_group_at_the_age_limit_and_keeps_the_others_for_later(engine, make_args):
    engine.answer = SlowRow(rounds=1)
    outputs, source = three_rounds(engine, make_args, partial_rollout_max_age=1)
    assert rows(outputs[0]) == [1, 2] and 0 in rows(outputs[1])
    slow = outputs[1].samples[0][0]
    assert slow.data_row == 0 and slow.metadata["start_rollout_id"] == 0 and slow.response_length == 2 + 3
    assert outputs[1].metrics["rollout/continued_groups"] == 1 == outputs[1].metrics["rollout/oldest_group"]
    assert source.stats()["aged_out"] == 0 and source.stats()["trained"] == 6


def test_without_a_limit_a_group_is_continued_in_every_round_until_it_is_ready(engine, make_args):
    engine.answer = SlowRow(rounds=2)
    outputs, source = three_rounds(engine, make_args)
    assert 0 not in rows(outputs[0]) + rows(outputs[1])
    waiting = [group for group in source.buffer if group[0].data_row == 0]
    assert 0 in rows(outputs[2]) or waiting[0][0].response_length >= 4


def test_a_policy_that_drops_counts_what_aged_out(engine, make_args):
    engine.answer = SlowRow(rounds=9)
    outputs, source = three_rounds(engine, make_args, partial_rollout_max_age=1, round_policy_path=DROPPING)
    assert [output.metrics.get("rollout/aged_out_groups") for output in outputs] == [None, 1, None]
    assert source.stats()["aged_out"] == 1 and source.ledger.per_row()[0] == {"aged_out": 1}


def test_what_is_older_than_the_limit_when_it_is_drawn_is_not_trained(engine, make_args):
    """Groups that lay in the buffer: after a pause, or because the limit was lowered."""
    args = make_args(engine, partial_rollout=True, partial_rollout_max_age=1)
    source = create_data_source(args)
    old = source.get_samples(1)
    old[0][0].metadata["start_rollout_id"] = 2
    source.add_samples(old)
    output = generate_rollout(args, 4, source)
    assert rows(output) == [1, 2] and output.metrics["rollout/aged_out_groups"] == 1
    assert source.stats()["aged_out"] == 1


@pytest.mark.parametrize("max_age, response_length", [(0, 0), (1, 3)])
def test_finished_surplus_is_kept_unless_it_would_be_too_old_next_round(engine, make_args, max_age, response_length):
    args = make_args(engine, partial_rollout_max_age=max_age, round_policy_path=f"{__name__}.TakeThree")
    source = create_data_source(args)
    progress, late_row = GenerateState(args).progress, 2

    async def answer(payload):
        if row_of(payload) == late_row:
            await until(lambda: progress.snapshot()["phases"]["generate"]["done"] == 2, "the two others")
        return reply([7, 8, 9], "abc")

    engine.answer = answer
    output = generate_rollout(args, 0, source)
    assert rows(output) == [0, 1] and output.metrics["rollout/surplus_groups"] == 1
    (waiting,) = source.buffer
    assert [sample.response_length for sample in waiting] == [response_length] * 2
    late_row = 4
    assert rows(generate_rollout(args, 1, source)) == [2, 3]


class TakeThree(RoundPolicy):
    """A user's policy: starts three groups at once and waits for all of them."""

    def num_to_start(self, view):
        return 3 - view.num_passed - view.num_running

    def is_over(self, view):
        return view.num_passed == 3


class StopsEarly(RoundPolicy):
    def is_over(self, view):
        return view.num_passed == 1


def test_a_policy_that_ends_a_round_without_enough_groups_is_named(engine, make_args):
    args = make_args(engine, round_policy_path=f"{__name__}.StopsEarly", rollout_batch_size=4)
    engine.answer = lambda payload: reply([7]) if row_of(payload) == 0 else "hang"
    with pytest.raises(RuntimeError, match="StopsEarly ended the round with 1 of 4 groups"):
        generate_rollout(args, 0, create_data_source(args))


@pytest.mark.parametrize(
    "method, body, message",
    [
        ("is_over", "return {}['x']", r"(?s)--round-policy-path \S+:Mine raised KeyError: 'x'\n.*line 4, in is_over"),
        (
            "is_over",
            "return None",
            r"--round-policy-path \S+:Mine answered None to is_over; expected class \(args\) like",
        ),
        ("num_to_start", "return 'all'", "answered 'all' to num_to_start"),
        ("leftover", "return 'keep'", "answered 'keep' to leftover"),
    ],
)
def test_a_policy_that_fails_or_answers_oddly_is_named(make_args, tmp_path, method, body, message):
    text = f"from slime.rollout.round_policy import RoundPolicy\nclass Mine(RoundPolicy):\n    def {method}(self, *_):\n        {body}\n"
    (tmp_path / "mine.py").write_text(text)
    policy = create_policy(make_args(round_policy_path=f"{tmp_path}/mine.py:Mine"))
    assert policy.target == 2
    with pytest.raises((ValueError, RuntimeError), match=message):
        getattr(policy, method)(0, False)


class StartsMoreEachRound(RoundPolicy):
    """A policy that goes by what it has seen in earlier rounds."""

    def __init__(self, args):
        super().__init__(args)
        self.rounds = set()

    def num_to_start(self, view):
        self.rounds.add(view.rollout_id)
        return self.target + len(self.rounds) - 1 - view.num_passed - view.num_running

    def is_over(self, view):
        return view.num_running == 0


def test_a_policy_is_built_once_and_keeps_what_it_has_learnt(engine, make_args):
    args = make_args(engine, round_policy_path=f"{__name__}.StartsMoreEachRound")
    source = create_data_source(args)
    outputs = [generate_rollout(args, rollout_id, source) for rollout_id in range(3)]
    assert [output.metrics.get("rollout/surplus_groups", 0) for output in outputs] == [0, 1, 2]


def test_the_default_goes_by_arguments_that_a_rollout_function_of_the_users_has_changed(engine, make_args):
    args = make_args(engine)
    source = create_data_source(args)
    generate_rollout(args, 0, source)
    changed = copy.copy(args)
    changed.over_sampling_batch_size = 5
    metrics = generate_rollout(changed, 1, source).metrics
    assert metrics.get("rollout/surplus_groups", 0) + metrics.get("rollout/aborted_groups", 0) == 3
