import pytest

from slime.observability.metric_utils import (
    clip_ratio,
    describe,
    mean,
)


def test_fb_o01_clip_ratio_counts_lengths_at_the_limit():
    assert clip_ratio([10, 10, 5], 10) == pytest.approx(2 / 3)


def test_empty_inputs_give_nothing():
    assert (describe("x", []), mean([]), clip_ratio([], 5)) == ({}, None, None)
