"""Instructions of IFBench (Pyatkin et al. 2025, "Generalizing Verifiable Instruction Following") that count: `count:` and `ratio:`."""

from __future__ import annotations

import re

from slime.rollout.rm_hub.instructions.language import language_of
from slime.rollout.rm_hub.instructions.lexicon import CONJUNCTIONS, PERSON_NAMES, PRONOUNS, STOP_WORDS
from slime.rollout.rm_hub.instructions.text import lower_words, sentences

_NUMBER = re.compile(r"(?<![^\W_])\d+(?:[.,]\d+)*(?![^\W_])")
_INTERROBANG = re.compile(r"\?!|!\?|‽")


def word_count_range(text: str, kw: dict) -> bool:
    return kw["min_words"] <= len(text.split()) <= kw["max_words"]


def unique_word_count(text: str, kw: dict) -> bool:
    return len(set(lower_words(text))) >= kw["N"]


def stop_words(text: str, kw: dict) -> bool:
    found = lower_words(text)
    return bool(found) and 100 * sum(word in STOP_WORDS for word in found) <= kw["percentage"] * len(found)


def _kinds(text: str) -> tuple[int, int, int]:
    """Return the numbers of declarative, interrogative and exclamatory sentences."""
    ends = [sentence.rstrip("\"'”’)]*_") for sentence in sentences(text)]
    return tuple(sum(end.endswith(mark) for end in ends) for mark in ".?!")


def sentence_type(text: str, kw: dict) -> bool:
    declarative, interrogative, _ = _kinds(text)
    return interrogative > 0 and declarative == 2 * interrogative


def sentence_balance(text: str, kw: dict) -> bool:
    counts = _kinds(text)
    return counts[0] > 0 and len(set(counts)) == 1


def conjunctions(text: str, kw: dict) -> bool:
    return len(CONJUNCTIONS & set(lower_words(text))) >= kw["small_n"]


def person_names(text: str, kw: dict) -> bool:
    found = set(re.findall(r"[A-Z][a-z]+", text))
    return len(PERSON_NAMES & found) >= kw["N"]


def overlap(text: str, kw: dict) -> bool:
    """The share of the response's distinct trigrams of characters that the reference has, within 2 percent."""
    own, reference = _trigrams(text), _trigrams(kw["reference_text"])
    return bool(own) and abs(100 * len(own & reference) / len(own) - kw["percentage"]) <= 2


def _trigrams(text: str) -> set[str]:
    return {text[i : i + 3] for i in range(len(text) - 2)}


def numbers(text: str, kw: dict) -> bool:
    return len(_NUMBER.findall(text)) == kw["N"]


def punctuation(text: str, kw: dict) -> bool:
    """Every mark of . , ! ? ; : and an interrobang."""
    return _INTERROBANG.search(text) is not None and all(mark in text for mark in ".,!?;:")


def pronouns(text: str, kw: dict) -> bool:
    found = (word.split("'")[0] for word in lower_words(text))
    return sum(word in PRONOUNS for word in found) >= kw["N"]


def words_japanese(text: str, kw: dict) -> bool:
    """Every N-th word, by white space, is Japanese; there is at least one such place."""
    chosen = text.split()[int(kw["N"]) - 1 :: int(kw["N"])]
    return bool(chosen) and all(_is_japanese(word) for word in chosen)


def _is_japanese(word: str) -> bool:
    return language_of(word) in ("ja", "zh")


def keywords_multiple(text: str, kw: dict) -> bool:
    found = lower_words(text)
    wanted = ((kw[f"keyword{i}"], times) for i, times in enumerate((1, 2, 3, 5, 7), start=1))
    return all(found.count(keyword.lower()) == times for keyword, times in wanted)


def sentence_words(text: str, kw: dict) -> bool:
    """Three sentences of equally many characters, and no word twice."""
    parts = sentences(text)
    found = lower_words(text)
    return len(parts) == 3 and len({len(part) for part in parts}) == 1 and len(set(found)) == len(found)


CHECKS = {
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_word_count,
    "count:conjunctions": conjunctions,
    "count:person_names": person_names,
    "count:numbers": numbers,
    "count:punctuation": punctuation,
    "count:pronouns": pronouns,
    "count:words_japanese": words_japanese,
    "count:keywords_multiple": keywords_multiple,
    "ratio:stop_words": stop_words,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_balance": sentence_balance,
    "ratio:overlap": overlap,
    "ratio:sentence_words": sentence_words,
}
