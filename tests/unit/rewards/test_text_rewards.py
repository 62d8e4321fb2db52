r"""The `dapo`, `f1` and `gpqa` graders against the documented tables."""

from __future__ import annotations

import time

import pytest

from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward, extract_letter
from slime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer


@pytest.mark.parametrize(
    "solution, label",
    [
        ("Answer: 42", "42"), ("answer : 42", "42"), ("Answer: $42$", "42"), (r"Answer: \boxed{42}", "42"),
        ("Answer: x=42", "42"), ("Answer: 1,234", "1234"), ("Answer: 42 dollars", "42"),
        ("Final Answer: 42 units", "42"), ("Answer:\n42", "42"), ("Answer: 42<|im_end|>", "42"), ("Answer: -7", "-7"),
        ("Answer: 42", "42.0"), ("Answer: 42", 42), ("Answer: 1\nAnswer: 42", "42"), ("**Answer:** 5", "5"),
        ("**Answer: 5**", "5"), ("Answer: 5.", "5"), ("Answer: 5.0", "5"), (r"Answer: \frac{1}{2}", "1/2"),
        ("Answer: 1/2", 0.5), ("Answer: hello", "hello"), ("Answer: 0", 0),
    ],
)  # fmt: skip
def test_fb_r04_dapo_accepts_equal_forms(solution, label):
    result = compute_score(solution, label)
    assert result["score"] == 1.0 and result["acc"] is True and isinstance(result["pred"], str)


@pytest.mark.parametrize(
    "solution, label",
    [
        (r"\boxed{42}", "42"), ("Answer: 42" + " " * 301, "42"), ("Answer: 42", ""), ("Answer: 42", None),
        ("Answer: 41", "hello"), ("Answer: 1/0", "5"), ("Answer: 5", "1/0"), ("", "5"), ("Answer: 0", 0.5),
    ],
)  # fmt: skip
def test_fb_r04_dapo_scores_minus_one_and_never_raises(solution, label):
    assert compute_score(solution, label)["score"] == -1.0


def test_dapo_without_answer_line_reports_invalid():
    assert compute_score("no idea", "5") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


def test_dapo_strict_box_compares_character_by_character():
    assert compute_score(r"\boxed{42}", "42", strict_box_verify=True)["score"] == 1.0
    assert compute_score(r"\boxed{ 42}", "42", strict_box_verify=True)["score"] == -1.0
    assert compute_score(r"\boxed{42}", 42, strict_box_verify=True)["score"] == -1.0
    assert compute_score(r"\boxed{42}" + " " * 101, "42", strict_box_verify=True)["score"] == -1.0


@pytest.mark.parametrize(
    "text, normalized",
    [
        ("x = 42", "42"), ("an answer", "answer"), ("42 square", "42"), ("100 dollars", "100"), (r"\text{hello}", "hello"),
        (r"\boxed{42}", "42"), ("1,234,567", "1234567"), ("1,2", "12"), ("a b c", "bc"), (r"42^\circ", "42"),
        (r"\frac12", r"\frac{1}{2}"), (r"\sqrt23", r"\sqrt{2}3"), ("$5$ and $6$", "5"), (r"\$15", "15"), ("100%", "100%"),
        ("42<|endoftext|>", "42"),
    ],
)  # fmt: skip
def test_dapo_normalisation(text, normalized):
    assert normalize_final_answer(text) == normalized


@pytest.mark.parametrize(
    "prediction, truth, score",
    [
        ("the red car", "a fast red car", 0.8), ("New York City", "new york", 0.8), ("cat cat dog", "cat dog dog", 2 / 3),
        ("yes", "Yes.", 1), ("yes it is", "yes", 0), ("the cat", "cat", 1), (None, "x", 0), ("", "x", 0),
        ("the", "the", 0), ("no answer", "noanswer", 0), ("x", None, 0), ("0", 0, 1),
    ],
)  # fmt: skip
def test_f1_of_short_answers(prediction, truth, score):
    assert f1_score(prediction, truth) == pytest.approx(score)


def test_f1_normalisation():
    assert [normalize_answer(t) for t in ("The Big, Red Dog.", "a.b,c!", "the")] == ["big red dog", "abc", ""]


FOUR = {"choices": ["Smallest", "Moon", "Largest Planet", "Sun"]}


@pytest.mark.parametrize(
    "response, label, metadata",
    [
        ("Answer: C", "C", {}), ("**Answer: C**", "C", {}), (r"\boxed{C}", "C", {}), ("C", "c", {}), ("c", "C", {}),
        ("Choice a", "A", {}), ("Answer: C", 2, FOUR), ("Answer: C", "2", FOUR),
        ("Answer: B", 1, {"choices": {"x": "u", "y": "v"}}),
        ("so the answer is B", "largest planet", {"choices": ["x", "Largest Planet"]}),
        ("surely rome.", "Rome", {"choices": ["Paris", "Rome"]}), ("Answer: A", None, {"correct_letter": "a"}),
        ("answer: B</think>answer: C", "C", {}), ("The best answer is Alpha", 0, {"choices": ["alpha", "beta"]}),
        ("answer is (C)", "C", {}), ("The answer is correct: B", "B", {}), ("answer: it is B", "B", {}),
        ("choice between A and B: A", "A", {}), ("The answer is (B)", "B", {}), ("The answer is clearly B", "B", {}),
        ("The answer is not A, it is B", "B", {}), ("B is the correct one", "B", {}),
    ],
)  # fmt: skip
def test_fb_r03_gpqa_finds_the_chosen_letter(response, label, metadata):
    assert compute_gpqa_reward(response, label, metadata) == 1.0


@pytest.mark.parametrize(
    "response, label, metadata",
    [
        ("The answer is C.", "D", {}), (None, "A", {}), ("Answer: A", 9, FOUR), ("random text", "some answer", {}),
        ("Answer: Z", "A", {}), ("x", "²", {}), ("Answer: B", True, FOUR), ("", "A", {}),
    ],
)  # fmt: skip
def test_gpqa_rejects_other_choices(response, label, metadata):
    assert compute_gpqa_reward(response, label, metadata) == 0.0


@pytest.mark.parametrize("text", ["answer " * 20000, "answer: " + "(" * 50000, "it is " * 20000, "A " * 50000])
def test_gpqa_reads_long_repetitive_replies_quickly(text):
    started = time.process_time()
    compute_gpqa_reward(text, "B", {})
    assert time.process_time() - started < 2.0


def test_gpqa_named_letter_outside_the_valid_set_falls_back():
    assert extract_letter("Answer: C. Hmm, A then? No: B", ["A", "B"]) == "B"
