"""A run that names no reward is graded as math when its rows carry labels, and refused at start when they do not."""

from types import SimpleNamespace

import pytest

from slime.rollout.rm_hub.default import choose_reward
from slime.utils.types import Sample


def make_args(**changes):
    return SimpleNamespace(**({"rm_type": None, "custom_rm_path": None, "prompt_data": "rows.jsonl"} | changes))


def test_rows_with_labels_are_graded_as_math_and_it_is_said():
    args = make_args()
    assert "math" in choose_reward(args, [Sample(prompt="2+2?", label="4")])
    assert args.rm_type == "math"


def test_a_label_of_zero_is_a_label():
    args = make_args()
    choose_reward(args, [Sample(prompt="1-1?", label=0)])
    assert args.rm_type == "math"


def test_row_without_label_is_an_error_that_names_the_prompt():
    with pytest.raises(ValueError, match=r"2\+2.*--rm-type"):
        choose_reward(make_args(), [Sample(prompt="1+1?", label="2"), Sample(prompt="2+2?")])


@pytest.mark.parametrize("named", [{"rm_type": "f1"}, {"custom_rm_path": "my.reward"}])
def test_named_reward_is_left_alone(named):
    args = make_args(**named)
    assert choose_reward(args, [Sample(prompt="x")]) is None
    assert args.rm_type == named.get("rm_type")


def test_rows_that_name_their_own_reward_need_no_default():
    args = make_args()
    assert choose_reward(args, [Sample(prompt="x", metadata={"rm_type": "f1"})]) is None
    assert args.rm_type is None
