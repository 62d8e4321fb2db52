"""Cut English answers into words, sentences and paragraphs, and look at single words.

Invariants: every function is linear in the length of the text, so that an answer of a megabyte costs milliseconds; nothing
is looked up on the network. Rules instead of trained models: sentences end at . ! ? before white space, except after known
abbreviations and initials; syllables are counted by vowel groups.
"""

from __future__ import annotations

import re
import unicodedata

VOWELS = frozenset("aeiou")

_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]*_]*(?=\s)")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs etc inc ltd co corp no fig gen col capt lt sgt rev hon gov sen rep mt ave blvd dept est "
    "approx jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e u.s u.k a.m p.m ph.d cf al".split()
)
_NEVER_LAST = frozenset("mr mrs ms dr prof st vs e.g i.e cf fig gen col capt lt sgt rev hon gov sen rep".split())
_HIATUS = re.compile(r"(?<![cst])i(?!on|ous)[ao]|ea\Z|ie(?=nc|nt|t)|eo(?!p)|eat(?=e[ds]|i|or)|(?<!q)ua(?=[lt])")
_SILENT_END = re.compile(r"(?:[^aeiouyl]|[aeiouy]l)e\Z|[^aeiouytd]ed\Z|[^aeiouyszxcgh]es\Z")
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'"})


def words(text: str) -> list[str]:
    """Return the words: runs of letters and digits, with inner apostrophes and hyphens.

    >>> words("It's a well-known fact: 3 of 4.")
    ["It's", 'a', 'well-known', 'fact', '3', 'of', '4']
    """
    return _WORD.findall(text)


def lower_words(text: str) -> list[str]:
    """Return the words in lower case, curly apostrophes straightened."""
    return words(straight_quotes(text).lower())


def straight_quotes(text: str) -> str:
    """Replace typographic quotation marks by those of a keyboard."""
    return text.translate(_QUOTES)


def sentences(text: str) -> list[str]:
    """Return the sentences, stripped, in order.

    >>> sentences("Mr. Fox paid 3.5 dollars. Why? Because! He could, e.g. today")
    ['Mr. Fox paid 3.5 dollars.', 'Why?', 'Because!', 'He could, e.g. today']
    """
    found, start = [], 0
    for match in _END.finditer(text):
        if _ends_sentence(text, start, match):
            found.append(text[start : match.end()].strip())
            start = match.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def _ends_sentence(text: str, start: int, match: re.Match) -> bool:
    marks = match.group()
    following = text[match.end() : match.end() + 80].lstrip()
    if following[:1].islower() and (marks[0] in ".…" or marks[-1] in "\"'”’"):
        return False
    if marks[0] != "." or marks.startswith(".."):
        return True
    before = re.search(r"[\w.]*\Z", text[max(start, match.start() - 12) : match.start()]).group().lower()
    if before in _NEVER_LAST or (len(before) == 1 and before.isalpha() and before != "i"):
        return False
    return before not in _ABBREVIATIONS or not following or following[0].isupper()


def paragraphs(text: str) -> list[str]:
    """Return the non-empty parts between blank lines."""
    return [part.strip() for part in re.split(r"\n[ \t]*\n", text) if part.strip()]


def lines(text: str) -> list[str]:
    """Return the non-empty lines, stripped."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def syllables(word: str) -> int:
    """Estimate the syllables of an English word; at least 1.

    >>> [syllables(word) for word in ("cat", "apple", "making", "jumped", "created", "beautiful")]
    [1, 2, 2, 1, 3, 3]
    """
    word = re.sub(r"[^a-z]", "", word.lower())
    count = len(re.findall(r"[aeiouy]+", word)) + len(_HIATUS.findall(word))
    if _SILENT_END.search(word):
        count -= 1
    return max(1, count)


def is_emoji(character: str) -> bool:
    """Tell whether a character is an emoji, or belongs to one (joiners, selectors, skin tones)."""
    code = ord(character)
    return (
        0x1F000 <= code <= 0x1FAFF
        or 0x2600 <= code <= 0x27BF
        or 0x2B00 <= code <= 0x2BFF
        or code in (0x200D, 0xFE0F, 0x20E3, 0x203C, 0x2049, 0x2122, 0x2139, 0x231A, 0x231B, 0x3030, 0x303D)
        or 0x23E9 <= code <= 0x23FF
        or 0xE0020 <= code <= 0xE007F
    )


def is_punctuation(character: str) -> bool:
    """Tell whether a character is punctuation or a symbol."""
    return unicodedata.category(character)[0] in "PS"


def bare(word: str) -> str:
    """Return a white-space separated token without punctuation around it, in lower case."""
    return word.strip("".join({c for c in word if is_punctuation(c)})).lower() if word else ""
