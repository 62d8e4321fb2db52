import pytest

from slime.observability.metric_utils import (
    clip_ratio,
    describe,
    mean,
    merge_max,
    merge_weighted_means,
)


def test_fb_o02_token_means_of_ranks_are_weighted_by_their_tokens():
    assert merge_weighted_means([{"loss": (9.0, 9)}, {"loss": (11.0, 1)}]) == {"loss": 2.0}


def test_a_name_without_any_count_is_left_out():
    assert merge_weighted_means([{"loss": (0.0, 0)}, {}]) == {}


def test_fb_o02_a_maximum_over_ranks_is_a_maximum():
    assert merge_max([{"len": 10}, {"len": 4, "other": -1}]) == {"len": 10, "other": -1}


def test_fb_o01_clip_ratio_counts_lengths_at_the_limit():
    assert clip_ratio([10, 10, 5], 10) == pytest.approx(2 / 3)


def test_empty_inputs_give_nothing():
    assert (describe("x", []), mean([]), clip_ratio([], 5), merge_max([])) == ({}, None, None, {})
