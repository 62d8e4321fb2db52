"""Instructions of IFBench about the words and sentences themselves: `words:` and `sentence:`.

What compares neighbours needs neighbours: a response of one word or one sentence does not follow it.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from slime.rollout.rm_hub.instructions.lexicon import IRREGULAR_VERB_FORMS, VERBS
from slime.rollout.rm_hub.instructions.text import VOWELS, bare, lines, lower_words, sentences, syllables

_CLUSTER = re.compile(r"[b-df-hj-np-tv-z]{2}")


def _neighbours(items: Sequence, holds: Callable) -> bool:
    return len(items) > 1 and all(holds(a, b) for a, b in itertools.pairwise(items))


def _lettered(text: str) -> list[str]:
    """Return the words that begin with a Latin letter, in lower case."""
    return [word for word in lower_words(text) if word[0] in string.ascii_lowercase]


def alphabet(text: str, kw: dict) -> bool:
    def follows(a: str, b: str) -> bool:
        return ord(b[0]) - ord(a[0]) in (1, -25)

    return _neighbours(_lettered(text), follows)


def vowel(text: str, kw: dict) -> bool:
    found = set(text.lower()) & VOWELS
    return 0 < len(found) <= 3


def consonants(text: str, kw: dict) -> bool:
    found = lower_words(text)
    return bool(found) and all(_CLUSTER.search(word) for word in found)


def palindrome(text: str, kw: dict) -> bool:
    return sum(len(word) >= 5 and word == word[::-1] for word in lower_words(text)) >= 10


def prime_lengths(text: str, kw: dict) -> bool:
    found = lower_words(text)
    return bool(found) and all(_is_prime(len(word)) for word in found)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def start_verb(text: str, kw: dict) -> bool:
    found = lower_words(text)
    return bool(found) and _is_verb(found[0])


def _is_verb(word: str) -> bool:
    """Whether a word is a known verb, or a regular form of one."""
    if word in VERBS or word in IRREGULAR_VERB_FORMS or word.removesuffix("n't") in IRREGULAR_VERB_FORMS:
        return True
    for suffix, endings in (("ing", ("", "e")), ("ed", ("", "e")), ("es", ("",)), ("s", ("",)), ("d", ("",))):
        stem = word.removesuffix(suffix)
        if stem == word:
            continue
        stems = [stem + ending for ending in endings]
        stems += [stem[:-1]] if len(stem) > 2 and stem[-1] == stem[-2] else []
        stems += [stem[:-1] + "y"] if stem.endswith("i") else []
        if any(candidate in VERBS for candidate in stems):
            return True
    return False


def repeats(text: str, kw: dict) -> bool:
    return max(Counter(lower_words(text)).values(), default=0) <= kw["small_n"]


def odd_even_syllables(text: str, kw: dict) -> bool:
    return _neighbours([syllables(word) % 2 for word in _lettered(text)], lambda a, b: a != b)


def last_first(text: str, kw: dict) -> bool:
    parts = [found for found in map(lower_words, sentences(text)) if found]
    return _neighbours(parts, lambda a, b: a[-1] == b[0])


def paragraph_last_first(text: str, kw: dict) -> bool:
    parts = [found for found in map(lower_words, lines(text)) if found]
    return bool(parts) and all(len(found) > 1 and found[0] == found[-1] for found in parts)


def no_consecutive(text: str, kw: dict) -> bool:
    return _neighbours(lower_words(text), lambda a, b: a[0] != b[0])


def keywords_specific_position(text: str, kw: dict) -> bool:
    parts, sentence, word = sentences(text), int(kw["n"]), int(kw["m"])
    found = [bare(token) for token in parts[sentence - 1].split()] if 1 <= sentence <= len(parts) else []
    return 1 <= word <= len(found) and found[word - 1] == kw["keyword"].lower()


def words_position(text: str, kw: dict) -> bool:
    found, keyword = [bare(token) for token in text.split()], kw["keyword"].lower()
    return len(found) > 2 and found[1] == found[-2] == keyword


def alliteration_increment(text: str, kw: dict) -> bool:
    runs = [_longest_alliteration(sentence) for sentence in sentences(text)]
    return _neighbours(runs, lambda a, b: b > a)


def _longest_alliteration(sentence: str) -> int:
    groups = itertools.groupby(lower_words(sentence), key=lambda word: word[0])
    return max((len(list(group)) for _, group in groups), default=0)


def increment(text: str, kw: dict) -> bool:
    lengths = [len(sentence.split()) for sentence in sentences(text)]
    return _neighbours(lengths, lambda a, b: b - a == kw["small_n"])


def keyword(text: str, kw: dict) -> bool:
    parts, position = sentences(text), int(kw["N"])
    if not 1 <= position <= len(parts):
        return False
    return re.search(rf"\b{re.escape(kw['word'])}\b", parts[position - 1], re.IGNORECASE) is not None


CHECKS = {
    "words:alphabet": alphabet,
    "words:vowel": vowel,
    "words:consonants": consonants,
    "words:palindrome": palindrome,
    "words:prime_lengths": prime_lengths,
    "words:start_verb": start_verb,
    "words:repeats": repeats,
    "words:odd_even_syllables": odd_even_syllables,
    "words:last_first": last_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:no_consecutive": no_consecutive,
    "words:keywords_specific_position": keywords_specific_position,
    "words:words_position": words_position,
    "sentence:alliteration_increment": alliteration_increment,
    "sentence:increment": increment,
    "sentence:keyword": keyword,
}
