r"""Grade `Answer: ...` lines: the `dapo` reward type.

The last `Answer:` line within the last 300 characters decides. Markdown around it, a final full stop and equal written
forms of a number do not matter. The result is {"score": 1.0 or -1.0, "acc": bool, "pred": str}; select the score with
`--reward-key score`. Nothing here raises on odd labels: a label that is no text or number scores -1 with a warning.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from slime.rollout.rm_hub.boxed import last_boxed_only_string
from slime.rollout.rm_hub.math_normalize import brace_fractions

logger = logging.getLogger(__name__)

TAIL_CHARS = 300
STRICT_TAIL_CHARS = 100
INVALID = "[INVALID]"

_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>")
_MARKDOWN = " \t*_`"
_UNIT_WORDS = re.compile(
    r"\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds"
    r"|meters|meals|edges|students|multiples|tickets)\b"
)
_NOTATION = (
    ("\\ldots", ""), ("\\dots", ""), ("\\mathrm{th}", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\;", ""),
    (",\\!", ""), ("{,}", ""), ('"', ""), ("\\!", ""), ("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"),
)  # fmt: skip


def compute_score(solution_str: str, ground_truth, strict_box_verify: bool = False, pause_tokens_index=None) -> dict:
    """Score one solution.

    Args:
        strict_box_verify: the last `\\boxed{}` within the last 100 characters must equal the label, character by
            character.
        pause_tokens_index: accepted for callers of the older signature, not used.
    """
    if strict_box_verify:
        box = last_boxed_only_string(solution_str[-STRICT_TAIL_CHARS:])
        pred = INVALID if box is None or not box.startswith("\\boxed{") else box[len("\\boxed{") : -1]
        correct = pred == ground_truth
    else:
        matches = _ANSWER_LINE.findall(solution_str[-TAIL_CHARS:])
        pred = normalize_final_answer(_clean_line(matches[-1])) if matches else INVALID
        correct = bool(matches) and answers_match(pred, ground_truth)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def answers_match(pred: str, label) -> bool:
    """Return whether a normalised prediction equals a label, as text or as a number."""
    if label is None or isinstance(label, bool) or str(label).strip() == "":
        logger.warning("dapo: label %r is empty; scored -1", label)
        return False
    truth = normalize_final_answer(str(label))
    if pred == truth:
        return pred != ""
    pred_value, truth_value = number_value(pred), number_value(truth)
    return pred_value is not None and pred_value == truth_value


def number_value(text: str) -> Fraction | None:
    r"""Return the exact value of an integer, decimal, `a/b` or `\frac{a}{b}`; None for anything else.

    >>> number_value("5.0") == number_value("5"), number_value(r"\frac{1}{2}")
    (True, Fraction(1, 2))
    """
    text = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}$", r"\1\2/\3", text).replace("--", "")
    if len(text) > 100 or not re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:/\d+)?", text):
        return None
    numerator, _, denominator = text.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def _clean_line(line: str) -> str:
    """Remove special tokens, markdown marks and a final full stop around an answer."""
    line = _SPECIAL_TOKEN.sub("", line).strip(_MARKDOWN)
    return line[:-1].strip(_MARKDOWN) if line.endswith(".") else line


def normalize_final_answer(final_answer: str) -> str:
    r"""Return an answer in the short form that predictions and labels share.

    >>> normalize_final_answer("x = 42"), normalize_final_answer("1,234,567"), normalize_final_answer("$5$ and $6$")
    ('42', '1234567', '5')
    """
    text = _SPECIAL_TOKEN.sub("", final_answer).split("=")[-1]
    text = re.sub(r"\b(?:an|a) ", "", text).replace("\\$", "")
    text = _UNIT_WORDS.sub("", text)
    for old, new in _NOTATION:
        text = text.replace(old, new)
    text = text.strip()
    text = re.sub(r"^(.*?)\$(.*?)\$.*$", r"\2", text, flags=re.DOTALL)
    text = re.sub(r"\\(?:text|textbf|mathbf|mathrm|overline)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"\\sqrt\s*([^{\s])", r"\\sqrt{\1}", brace_fractions(text))
    text = text.replace("$", "").replace(" ", "")
    without_commas = text.replace(",", "")
    return without_commas if without_commas.lstrip("-").isdigit() else text
