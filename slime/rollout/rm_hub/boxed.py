r"""Find the answer inside the last `\boxed{...}` of a text.

The last box decides: braces are balanced, and an unterminated last box means no answer, even if an earlier one is
complete. `\fbox` is looked at only where no `\boxed` exists. `\boxed 5` (no braces) is not a box.
"""

from __future__ import annotations


def last_boxed_only_string(text: str) -> str | None:
    r"""Return the last `\boxed{...}` with its braces, or None.

    >>> last_boxed_only_string(r"\boxed{4} then \boxed{\frac{1}{2}}.")
    '\\boxed{\\frac{1}{2}}'
    """
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    opening = text.find("{", start)
    if start < 0 or opening < 0 or text[start:opening] not in ("\\boxed", "\\fbox"):
        return None
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start : position + 1]
    return None


def remove_boxed(text: str | None) -> str | None:
    r"""Return the content of a string that is exactly `\boxed{...}` (or `\fbox{...}`), else None."""
    for prefix in ("\\boxed{", "\\fbox{"):
        if text is not None and text.startswith(prefix) and text.endswith("}"):
            return text[len(prefix) : -1]
    return None


def extract_boxed_answer(text: str) -> str | None:
    r"""Return the content of the last box of a text, or None."""
    return remove_boxed(last_boxed_only_string(text))
