"""Instructions of IFBench that belong to one question each: `custom:`."""

from __future__ import annotations

import csv
import datetime
import io
import re
import unicodedata

from slime.rollout.rm_hub.instructions.lexicon import AFRICAN_COUNTRIES, EUROPEAN_CAPITALS_NORTH_OF_45
from slime.rollout.rm_hub.instructions.text import lines, lower_words, sentences, words

_BULLET = re.compile(r"\A(?:[*•-]|\d+[.)])\s+")
_MIN_COUNTRIES = 52
_MIN_CAPITALS = 25
"""Of 54 and of 28: a name that lists spell or count differently may be missing."""


def multiples(text: str, kw: dict) -> bool:
    return [int(number) for number in re.findall(r"\d{1,9}", text)] == list(range(14, 50, 7))


def mcq_count_length(text: str, kw: dict) -> bool:
    """Four questions with five options each, nothing before the first, each question longer than the one before."""
    parts = re.split(r"^[ \t*#]*Question", text, flags=re.MULTILINE)
    if parts[0].strip() or len(parts) != 5:
        return False
    lengths = []
    for part in parts[1:]:
        question, *choices = re.split(r"^[ \t*-]*\(?[A-Ea-e][.):]", part, flags=re.MULTILINE)
        if len(choices) != 5 or not all(choice.strip() for choice in choices):
            return False
        lengths.append(len(question.strip()))
    return all(b > a for a, b in zip(lengths, lengths[1:], strict=False))


def reverse_newline(text: str, kw: dict) -> bool:
    """The countries of Africa, one per line, in reverse alphabetical order."""
    given = [_name(_BULLET.sub("", line)) for line in lines(text)]
    known = {name: country for country in AFRICAN_COUNTRIES for name in country}
    found = [known.get(name) for name in given]
    return None not in found and len(set(found)) >= _MIN_COUNTRIES and given == sorted(given, reverse=True)


def european_capitals_sort(text: str, kw: dict) -> bool:
    """The capitals north of 45 degrees from north to south, separated by commas; lists of Europe differ by a few."""
    given = [_name(item) for item in text.strip().rstrip(".").split(",")]
    place = {name: i for i, names in enumerate(EUROPEAN_CAPITALS_NORTH_OF_45) for name in names}
    found = [place.get(name, -1) for name in given]
    return len(set(found)) >= _MIN_CAPITALS and -1 not in found and found == sorted(set(found))


def _name(text: str) -> str:
    """Return a name in lower case without accents and without what is in brackets."""
    text = unicodedata.normalize("NFKD", re.sub(r"\([^()]*\)", "", text).replace("’", "'"))
    return re.sub(r"[^a-z' -]", "", text.lower()).strip()


def word_reverse(text: str, kw: dict) -> bool:
    """A sentence about the bald eagle, its words in reverse order."""
    found = lower_words(text)
    return len(found) > 2 and "bald eagle" in " ".join(reversed(found)) and "bald eagle" not in " ".join(found)


def character_reverse(text: str, kw: dict) -> bool:
    return "elgae dlab" in text.lower()


def sentence_alphabet(text: str, kw: dict) -> bool:
    starts = [found[0][0].lower() for found in map(words, sentences(text)) if found]
    return "".join(starts) == "abcdefghijklmnopqrstuvwxyz"


def _table(text: str, delimiter: str, header: list[str], num_rows: int) -> list[list[str]] | None:
    """Return the rows below the header, or None when the text is no such table."""
    try:
        rows = list(csv.reader(io.StringIO(text.strip()), delimiter=delimiter, skipinitialspace=True, strict=True))
    except csv.Error:
        return None
    rows = [[field.strip() for field in row] for row in rows if row]
    fits = len(rows) == num_rows + 1 and rows[0] == header and all(len(row) == len(header) for row in rows)
    return rows[1:] if fits else None


def csv_city(text: str, kw: dict) -> bool:
    return _table(text, ",", ["ID", "Country", "City", "Year", "Count"], 7) is not None


def csv_special_character(text: str, kw: dict) -> bool:
    """Some field in double quotes holds a special character."""
    header = ["ProductID", "Category", "Brand", "Price", "Stock"]
    quoted = re.findall(r'"([^"\n]*)"', text)
    return _table(text, ",", header, 14) is not None and any(re.search(r"[^\w\s]", field) for field in quoted)


def csv_quotes(text: str, kw: dict) -> bool:
    """Every field stands in double quotes, between tabs."""
    header = ["StudentID", "Subject", "Grade", "Semester", "Score"]
    quoted = all(re.fullmatch(r'"[^"]*"(?:\t"[^"]*")*', line) for line in lines(text))
    return quoted and _table(text, "\t", header, 3) is not None


def date_format_list(text: str, kw: dict) -> bool:
    return all(_is_date(item.strip()) for item in text.strip().rstrip(".").split(","))


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
        return False
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


CHECKS = {
    "custom:multiples": multiples,
    "custom:mcq_count_length": mcq_count_length,
    "custom:reverse_newline": reverse_newline,
    "custom:word_reverse": word_reverse,
    "custom:character_reverse": character_reverse,
    "custom:sentence_alphabet": sentence_alphabet,
    "custom:european_capitals_sort": european_capitals_sort,
    "custom:csv_city": csv_city,
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": date_format_list,
}
