r"""Bring mathematical answers to a common written form.

Two forms exist: `normalize_latex` keeps LaTeX and repairs notation (as in the MATH data set's grader), `normalize_text`
turns LaTeX into a plain lower-case expression for `expressions.same_value`. Pure string work.
"""

from __future__ import annotations

import re

MAX_NUMBER_CHARS = 300
"""Longer digit strings stay text: no one means them as a number."""

_WHOLE_TEXT = re.compile(r"^\\text\{([^{}]+)\}$")
_SQRT_BARE = re.compile(r"\\sqrt\s*([^\s{\[])")
_FRAC_BARE = re.compile(r"\\frac\s*(?:(\{[^{}]*\})|([^\s{\\]))\s*(?:(\{)|([^\s{\\]))")
_INTEGER_RATIO = re.compile(r"^(-?\d+)/(-?\d+)$")


def normalize_latex(answer: str | None) -> str | None:
    r"""Return the answer with notation repaired: fractions and roots braced, units, degrees, percent and spaces gone.

    >>> normalize_latex(r"\frac12"), normalize_latex("k=7"), normalize_latex(r"5\text{ m}"), normalize_latex(".5")
    ('\\frac{1}{2}', '7', '5', '\\frac{1}{2}')
    """
    if answer is None:
        return None
    text = answer.strip()
    whole = _WHOLE_TEXT.match(text)
    text = whole.group(1).strip() if whole else text
    for old, new in (
        ("\n", ""), ("\\!", ""), ("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"), ("\\left", ""), ("\\right", ""),
        ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("\\%", ""), ("%", ""), (" .", " 0."), ("{.", "{0."),
    ):  # fmt: skip
        text = text.replace(old, new)
    text = text.split("\\text{ ")[0]
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left.strip()) <= 2:
        text = right
    text = _SQRT_BARE.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = brace_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    ratio = _INTEGER_RATIO.match(text)
    return f"\\frac{{{ratio.group(1)}}}{{{ratio.group(2)}}}" if ratio else text


def brace_fractions(text: str) -> str:
    r"""Write `\frac12` and `\frac1{72}` with both braces."""

    def repair(match: re.Match) -> str:
        numerator = match.group(1) or f"{{{match.group(2)}}}"
        return f"\\frac{numerator}" + (match.group(3) or f"{{{match.group(4)}}}")

    return _FRAC_BARE.sub(repair, text)


_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
_UNIT = re.compile(rf"(?<![a-zA-Z\\])(?:{_UNITS})(?:es|s)?(?![a-zA-Z]) *(?:\^\{{?[0-9]+\}}?)?")
_SCALES = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_THOUSANDS = re.compile(r"(\d),(?=\d{3}(?:\D|$))")
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_ROOT = re.compile(r"\\sqrt\{([^{}]*)\}")
_SIMPLE = re.compile(r"^(?:-?\d+(?:\.\d+)?|[a-z])$")
_SYMBOLS = (
    ("\\cdot", "*"), ("\\times", "*"), ("\\pi", "pi"), ("\\infty", "inf"), ("\\cup", "U"), ("\\left", ""),
    ("\\right", ""), ("\\,", ""), ("\\;", ""), ("\\ ", " "), ("\\mathrm", ""), ("\\text", ""), ("\\!", ""),
    ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"), ("√", "sqrt"), ("−", "-"),
)  # fmt: skip


def normalize_text(answer: str | None) -> str | None:
    r"""Return the answer as a plain expression.

    >>> normalize_text(r"1\frac{1}{2}"), normalize_text("5 cm"), normalize_text("42.0"), normalize_text(r"\text{Paris}")
    ('1+1/2', '5', '42', 'paris')
    """
    if answer is None:
        return None
    text = answer.strip()
    whole = _WHOLE_TEXT.match(text)
    text = whole.group(1) if whole else text
    for old, new in (("\\%", ""), ("%", ""), ("\\$", ""), ("$", ""), (" or ", ","), (" and ", ",")):
        text = text.replace(old, new)
    for word, factor in _SCALES:
        text = text.replace(word, factor)
    text = _UNIT.sub("", re.sub(r"\^ *\{? *\\circ *\}?", "", text)).strip()
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    if "\\" in text or "√" in text or "π" in text:
        text = latex_to_text(text)
    text = re.sub(r"- +", "-", text)
    text = re.sub(r"(\d) +(\d)", r"\1+\2", text)
    text = re.sub(r"\s+", "", text).replace("{", "").replace("}", "").replace("**", "^").lower()
    return _integral(text)


def latex_to_text(text: str) -> str:
    r"""Turn fractions, roots and symbols into plain text: `\frac{1}{2}` -> ` 1/2`, `\sqrt{3}` -> `sqrt(3)`."""
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    text = _SQRT_BARE.sub(r"\\sqrt{\1}", brace_fractions(text))
    for _ in range(20):
        replaced = _FRACTION.sub(_fraction_text, _ROOT.sub(r"sqrt(\1)", text))
        if replaced == text:
            break
        text = replaced
    for old, new in _SYMBOLS:
        text = text.replace(old, new)
    return text.strip()


def _fraction_text(match: re.Match) -> str:
    parts = [part.strip() if _SIMPLE.match(part.strip()) else f"({part.strip()})" for part in match.groups()]
    return f" {parts[0]}/{parts[1]}"


def _integral(text: str) -> str:
    """Write integral numbers without decimals, leading zeros and thousands commas."""
    plain = strip_thousands(text)
    if len(plain) > MAX_NUMBER_CHARS:
        return text
    try:
        value = float(plain)
    except ValueError:
        return text
    if abs(value) < 1e15 and abs(value - round(value)) <= 1e-7:
        return str(int(round(value)))
    return str(int(plain)) if re.fullmatch(r"-?\d+", plain) else text


def strip_thousands(text: str) -> str:
    """Remove commas between a digit and a group of exactly three digits."""
    previous = None
    while previous != text:
        previous, text = text, _THOUSANDS.sub(r"\1", text)
    return text
