r"""Grade mathematical answers: the `math` reward type and the helpers users import.

An answer is right when its repaired LaTeX equals the label's, or when both are expressions of equal value. Deliberately
strict: `\frac{2}{4}` is not `\frac12`, an integer label needs an integer answer, more than two unknown letters or
towers of powers are not evaluated. Model text is never run as code and never takes long (`expressions`).
"""

from __future__ import annotations

import re

from slime.rollout.rm_hub.boxed import extract_boxed_answer, last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.expressions import same_value
from slime.rollout.rm_hub.math_normalize import normalize_latex, normalize_text, strip_thousands

__all__ = [
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "grade_math_answer",
    "last_boxed_only_string",
    "remove_boxed",
]

_RATIO = re.compile(r"^-?\d+/0*[1-9]\d*$")
_INTEGER = re.compile(r"^-?\d+$")
_NOT_EVALUATED = re.compile(r"\^\{|\^\(|\^\d\d|\^\d+\^")
_MAX_LETTERS = 2
MAX_ANSWER_CHARS = 2000
"""Longer answers count only when they equal the label character by character."""
_BRACKETS = "()[]"


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last `\boxed{}` of a passage, or None."""
    return extract_boxed_answer(passage)


def grade_answer_verl(solution_str: str, ground_truth) -> bool:
    r"""Return whether the last `\boxed{}` of a solution equals the label.

    A missing label (None or empty) is never matched; the number 0 is a label. A label with its own box is unboxed.
    """
    label = label_text(ground_truth)
    if label is None or not solution_str or "\\boxed" not in solution_str:
        return False
    answer = extract_boxed_answer(solution_str)
    return answer is not None and grade_math_answer(answer, label)


def label_text(label) -> str | None:
    """Return a label as text without its box; None when there is none."""
    if label is None or label == "" or isinstance(label, bool):
        return None
    text = str(label)
    return extract_boxed_answer(text) if "\\boxed" in text else text


def grade_math_answer(answer: str, label: str) -> bool:
    """Return whether a bare answer (no box) is right."""
    if answer.strip() == label.strip():
        return bool(answer.strip())
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    return grade_answer_mathd(answer, label) or grade_answer_sympy(answer, label)


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Compare the repaired LaTeX."""
    given, truth = normalize_latex(given_answer), normalize_latex(ground_truth)
    return bool(given) and given == truth


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Compare as plain expressions; tuples and intervals element by element, in order, with equal brackets."""
    given, truth = normalize_text(given_answer), normalize_text(ground_truth)
    if not given or not truth:
        return False
    if given == truth:
        return True
    given_items, truth_items = _split_tuple(given), _split_tuple(truth)
    if len(given_items) != len(truth_items):
        return False
    if len(truth_items) > 1 and (given[0], given[-1]) != (truth[0], truth[-1]):
        return False
    return all(_same_item(a, b) for a, b in zip(given_items, truth_items, strict=True))


def _split_tuple(text: str) -> list[str]:
    text = strip_thousands(text)
    inner = text[1:-1]
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(c in inner for c in _BRACKETS):
        return [item.strip() for item in inner.split(",")]
    return [text]


def _same_item(given: str, truth: str) -> bool:
    if given == truth:
        return bool(given)
    if _RATIO.match(given) and _RATIO.match(truth):
        return False
    if bool(_INTEGER.match(truth)) != bool(_INTEGER.match(given)):
        return False
    return _may_evaluate(given) and _may_evaluate(truth) and same_value(given, truth)


def _may_evaluate(text: str) -> bool:
    letters = {c for c in text.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    return len(letters) <= _MAX_LETTERS and not _NOT_EVALUATED.search(text)
