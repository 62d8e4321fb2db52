"""The `gpqa` reward type: multiple choice.

The answer letter is a standalone token of the valid set: the last one named as the answer ("answer: C", "X is
correct", a boxed letter), else the last standalone capital. Without a letter on both sides the choice's text decides.
"""

from __future__ import annotations

import re
import string

_DEFAULT_LETTERS = "ABCDEFGHIJ"
_FILLER_WORDS = "is|are|was|be|must|should|would|clearly|definitely|therefore|thus|option|choice|it|the|letter|correct|best|final|answer"
_FILLER = rf"(?:(?:{_FILLER_WORDS})\b|[\s:=*_(\[{{$`'\"]|\\(?:boxed|text|mathrm|mathbf)){{0,24}}"


def compute_gpqa_reward(response: str | None, label, metadata: dict | None = None) -> float:
    """Return 1.0 when the chosen option is the correct one, else 0.0.

    Args:
        label: letter, index into the choices, or the text of a choice. A bool is no label.
        metadata: optional keys choices (list or dict), valid_letters, correct_letter, correct_answer, answer_text.
    """
    if response is None:
        return 0.0
    metadata = metadata or {}
    choices = _choices(metadata)
    letters = _valid_letters(metadata, choices)
    correct = _correct_letter(metadata, label, choices, letters)
    solution = response.rsplit("</think>", 1)[-1]
    chosen = extract_letter(solution, letters)
    if correct is not None and chosen is not None:
        return float(chosen == correct)
    wanted = _answer_texts(metadata, label, choices, letters, correct)
    reply = f" {_normalize(solution)} "
    return float(any(f" {text} " in reply for text in wanted))


def extract_letter(text: str, letters: list[str]) -> str | None:
    """Return the option letter that a reply settles on, or None.

    >>> extract_letter("The answer is not A, it is (B)", ["A", "B"]), extract_letter("random", ["A"])
    ('B', None)
    """
    group = "[" + "".join(re.escape(letter) for letter in letters) + "]"
    letter = rf"(?<![A-Za-z0-9])({group})(?![A-Za-z0-9'])"
    patterns = (
        rf"(?:answer|option|choice)\b{_FILLER}{letter}",
        rf"(?<![A-Za-z0-9])({group})[)\]}}*]*\s+is\s+(?:the\s+)?correct",
        rf"\\boxed\s*\{{{_FILLER}{letter}",
    )
    named = []
    for pattern in patterns:
        for match in re.finditer(pattern, text, re.IGNORECASE):
            candidate = match.group(1)
            if _is_article(text, match) or _is_negated(text, match.start()):
                continue
            named.append((match.start(1), candidate.upper()))
    corrections = re.finditer(rf"\b(?:it|this|that)\s+is\s+{_FILLER}{letter}", text, re.IGNORECASE)
    if named or re.search(r"\b(?:answer|option|choice)\b", text, re.IGNORECASE):
        named += [(m.start(1), m.group(1).upper()) for m in corrections if not _is_article(text, m)]
    if named:
        return max(named)[1]
    standalone = re.findall(rf"(?<![A-Za-z0-9])({group})(?![A-Za-z0-9'])", text)
    if standalone:
        return standalone[-1]
    bare = text.strip().strip(".()").upper()
    return bare if bare in letters else None


def _is_article(text: str, match: re.Match) -> bool:
    """Return whether a lower-case letter is really a word ("a dog", "i think")."""
    return match.group(1) in "ai" and re.match(r"\s+[a-z]", text[match.end(1) :]) is not None


def _is_negated(text: str, start: int) -> bool:
    return re.search(r"\b(?:not|isn't)\s*$", text[max(0, start - 8) : start], re.IGNORECASE) is not None


def _choices(metadata: dict) -> list[str]:
    choices = metadata.get("choices") or []
    return [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]


def _valid_letters(metadata: dict, choices: list[str]) -> list[str]:
    if metadata.get("valid_letters"):
        return [str(letter).upper() for letter in metadata["valid_letters"]]
    return list(string.ascii_uppercase[: len(choices)]) if choices else list(_DEFAULT_LETTERS)


def _correct_letter(metadata: dict, label, choices: list[str], letters: list[str]) -> str | None:
    explicit = str(metadata.get("correct_letter") or "").strip().upper()
    if explicit:
        return explicit
    if isinstance(label, bool) or label is None:
        return None
    text = str(label).strip()
    if isinstance(label, (int, float)) or (text.isascii() and text.isdigit()):
        index = int(float(text))
        return letters[index] if 0 <= index < len(letters) else None
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    for letter, choice in zip(letters, choices, strict=False):
        if _normalize(choice) == _normalize(text):
            return letter
    return None


def _answer_texts(metadata: dict, label, choices: list[str], letters: list[str], correct: str | None) -> list[str]:
    """Return normalised texts that identify the right choice; single letters do not count."""
    texts = [metadata.get("correct_answer"), metadata.get("answer_text")]
    if correct in letters and letters.index(correct) < len(choices):
        texts.append(choices[letters.index(correct)])
    if isinstance(label, str):
        texts.append(label)
    normalized = [_normalize(str(text)) for text in texts if text]
    return [text for text in normalized if len(text) > 1]


def _normalize(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", text.lower()).split())
