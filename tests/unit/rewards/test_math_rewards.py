r"""The `math` and `deepscaler` graders against the documented tables, and their safety."""

from __future__ import annotations

import time

import pytest

from slime.rollout.rm_hub import get_deepscaler_rule_based_reward, grade_answer_verl
from slime.rollout.rm_hub.boxed import last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.expressions import same_value
from slime.rollout.rm_hub.math_normalize import normalize_latex
from slime.rollout.rm_hub.math_utils import extract_answer

RIGHT = [
    ("42", "42"), ("42.0", "42"), ("3", "3.0"), ("2.9999999999", "3"), ("1,000", "1000"), ("1{,}000", "1000"),
    ("1000", "1,000"), ("1e3", "1000"), ("007", "7"), ("0.5", r"\frac12"), (".5", "1/2"), ("0.25", r"\frac14"),
    ("1.5", r"\frac{3}{2}"), (r"1\frac{1}{2}", r"\frac{3}{2}"), (r"\dfrac{3}{4}", "0.75"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"50\%", "50"), (r"\$5", "5"), ("x=5", "5"), ("5", "x=5"), ("(1,2)", "(1, 2)"),
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\sqrt3", r"\sqrt{3}"), (r"2\pi", r"\pi\cdot 2"), (r"90^\circ", "90"),
    (r"5\text{ cm}", "5"), ("5 cm", "5"), ("12 inches", "12"), (r"\text{Paris}", "paris"), ("A", "a"), ("No", "no"),
    ("x^2+2x+1", "(x+1)^2"), ("xy", "yx"), ("2^{10}", "2^{10}"), (r"\infty", r"\infty"),
    (r"(-\infty,3)", r"(-\infty, 3)"), ("10:30", "10:30"), ("42", 42), ("0", 0), ("0", 0.0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("5", r"\boxed{5}"),
]  # fmt: skip
WRONG = [
    (r"\frac{2}{4}", r"\frac12"), ("2/4", "1/2"), ("[1,2)", "(1,2)"), ("(2,1)", "(1,2)"), ("1,2", "2,1"),
    (r"50\%", "0.5"), (r"\pi", "3.14159"), ("8/2", "4"), ("sqrt(4)", "2"), ("3+4", "7"), ("1/3", "0.3333"), ("", "5"),
    ("2^{10}", "1024"), ("10^3", "1000"), ("5 million", "5000000"), ("a+b+c", "c+b+a"), (r"\{2,1\}", r"\{1,2\}"),
    ("abc=5", "5"), ("5", None), ("5", ""), ("1", True),
]  # fmt: skip


@pytest.mark.parametrize("answer, label", RIGHT)
def test_equal_answers_are_right(answer, label):
    assert grade_answer_verl(rf"so it is \boxed{{{answer}}}.", label)


@pytest.mark.parametrize("answer, label", WRONG)
def test_strictly_different_answers_are_wrong(answer, label):
    assert not grade_answer_verl(rf"so it is \boxed{{{answer}}}.", label)


def test_fb_r07_the_last_box_decides():
    assert not grade_answer_verl(r"\boxed{5} and \boxed{", "5") and not grade_answer_verl(r"\boxed{5", "5")
    assert grade_answer_verl(r"\boxed{4} then \boxed{5}", "5") and not grade_answer_verl("5", "5")


def test_box_extraction_balances_braces():
    assert extract_answer(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert extract_answer(r"\boxed 5") is None and extract_answer("none") is None and remove_boxed("5") is None
    assert last_boxed_only_string(r"\fbox{3}") == r"\fbox{3}"
    assert last_boxed_only_string(r"\boxed{1} \fbox{3}") == r"\boxed{1}"


@pytest.mark.parametrize(
    "text, normalized",
    [
        (r"\frac12", r"\frac{1}{2}"), (r"\frac1{72}", r"\frac{1}{72}"), (r"\tfrac12", r"\frac{1}{2}"),
        (r"\left(1\right)", "(1)"), (r"45^{\circ}", "45"), (r"45^\circ", "45"), (".7", "0.7"), ("0.5", r"\frac{1}{2}"),
        ("3/4", r"\frac{3}{4}"), ("-1/2", r"\frac{-1}{2}"), ("a/b", "a/b"), ("1 + 1", "1+1"), (r"\sqrt3x", r"\sqrt{3}x"),
        ("k=7", "7"), (r"5\text{ m}", "5"), (r"12\%", "12"), (r"\text{42}", "42"), ("0.50", "0.50"), (None, None),
    ],
)  # fmt: skip
def test_latex_normalisation(text, normalized):
    assert normalize_latex(text) == normalized


@pytest.mark.parametrize(
    "answer",
    [
        '__import__("os").system("touch pwned")', "9**9**9**9", "9^9^9", "9^{9^{9^{9}}}", "(" * 200 + "1" + ")" * 200,
        "x^" * 100 + "2", "1/0", "(9^999)^999", "1" * 5000, "sqrt(" * 50 + "2" + ")" * 50,
    ],
)  # fmt: skip
def test_fb_r08_hostile_answers_do_nothing_and_end_quickly(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    assert not grade_answer_verl(rf"\boxed{{{answer}}}", "5")
    assert not grade_answer_verl(rf"\boxed{{{answer}}}", "x+1/2")
    assert time.process_time() - started < 1.0 and not list(tmp_path.iterdir())


def test_values_are_compared_exactly():
    assert same_value("0.75", "3/4") and same_value("-(2-3)x", "x") and same_value("2^-1", "1/2")
    assert not same_value("sqrt(x^2)", "x") and not same_value("1e3", "1000") and not same_value("1.0000000001", "1")


def test_huge_exponents_are_not_evaluated():
    assert same_value("2^1000", "4^500") and not same_value("2^(3*10^9)", "2^(3*10^9)+0")


def test_string_equal_answers_cost_microseconds():
    def seconds() -> float:
        started = time.process_time()
        for _ in range(200):
            grade_answer_verl(r"a \boxed{1 2 3}", "1 2 3")
        return (time.process_time() - started) / 200

    assert min(seconds() for _ in range(5)) < 200e-6


@pytest.mark.parametrize(
    "response, label, score",
    [
        (r"\boxed{42}", "42", 0), (r"a</think>\boxed{42}", "42", 1), (r"a</think>\boxed{42}", 42, 1),
        (r"a</think>\boxed{42}", 42.0, 1), (r"a</think>\boxed{42}", r"\boxed{42}", 1),
        (r"\boxed{99}</think>\boxed{42}", "42", 1), (r"a</think>b\boxed{1}</think>\boxed{42}", "42", 1),
        (r"x###Response\boxed{42}", "42", 1), (r"x###Response\boxed{42}###Response\boxed{1}", "42", 1),
        ("</think>42", "42", 0), (r"</think>\boxed{0}", 0, 1), (r"</think>\boxed{\frac{1}{2}}", "0.5", 1),
        (r"</think>\boxed{x", "x", 0), (r"</think>\boxed{42}", "", 0), (r"</think>\boxed{42}", None, 0),
    ],
)  # fmt: skip
def test_deepscaler_grades_the_solution_part(response, label, score):
    assert get_deepscaler_rule_based_reward(response, label) == score
