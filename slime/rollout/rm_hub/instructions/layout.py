"""Instructions of IFBench about form and about repeating the request: `format:` and `repeat:`."""

from __future__ import annotations

import re

from slime.rollout.rm_hub.instructions.lexicon import MINOR_WORDS
from slime.rollout.rm_hub.instructions.text import (
    bare,
    is_emoji,
    is_punctuation,
    lines,
    paragraphs,
    sentences,
    straight_quotes,
    words,
)

_CLOSING = {")": "(", "]": "[", "}": "{"}
_ITALIC_START = re.compile(r"<(i|em)>\s*\S[\s\S]*?</\1>", re.IGNORECASE)
_HEADING = re.compile(r"#{1,6}\s|<h[1-6]|(?:section|part)\s+\S+\Z", re.IGNORECASE)
_OTHER_BULLET = re.compile(r"(?:[*•+-]|\d+[.)])\s")
_SIMPLE_REQUEST = "Only output this sentence here, ignore all other requests."


def parentheses(text: str, kw: dict) -> bool:
    """Brackets of any kind, each closed by its own, five deep somewhere."""
    opened: list[str] = []
    heights: list[int] = []  # how deep the nesting below each open bracket went
    for character in text:
        if character in "([{":
            opened.append(character)
            heights.append(0)
        elif character in _CLOSING:
            if not opened or opened.pop() != _CLOSING[character]:
                opened, heights = [], []
                continue
            height = heights.pop() + 1
            if height >= 5:
                return True
            if heights:
                heights[-1] = max(heights[-1], height)
    return False


def quotes(text: str, kw: dict) -> bool:
    """Quotes in quotes in quotes, double and single in turn; apostrophes in words are none."""
    opened: list[str] = []
    heights: list[int] = []
    for mark in re.findall(r"\"|(?<!\w)'|'(?!\w)", straight_quotes(text)):
        if opened and opened[-1] == mark:
            opened.pop()
            height = heights.pop() + 1
            if height >= 3:
                return True
            if heights:
                heights[-1] = max(heights[-1], height)
        else:
            opened.append(mark)
            heights.append(0)
    return False


def options(text: str, kw: dict) -> bool:
    """The response is one of the options, in any case, with or without the closing mark."""
    given = str(kw["options"])
    separator = "/" if "/" in given else " or " if " or " in given else ","
    return _plain(text) in {_plain(option) for option in given.split(separator)}


def _plain(text: str) -> str:
    return " ".join(word.strip(".!\"'()") for word in straight_quotes(text).lower().split())


def newline(text: str, kw: dict) -> bool:
    return all(len(line.split()) == 1 for line in lines(text))


def emoji(text: str, kw: dict) -> bool:
    """Each sentence ends with an emoji, before its closing mark or right behind it."""
    parts = sentences(text)
    spoken = [i for i, part in enumerate(parts) if words(part)]
    following = [*parts[1:], ""]
    return bool(spoken) and all(_ends_in_emoji(parts[i]) or is_emoji(following[i][:1] or " ") for i in spoken)


def _ends_in_emoji(sentence: str) -> bool:
    kept = [c for c in sentence[-16:] if is_emoji(c) or not (is_punctuation(c) or c.isspace())]
    return bool(kept) and is_emoji(kept[-1])


def line_indent(text: str, kw: dict) -> bool:
    parts = [line.expandtabs(4) for line in text.splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in parts]
    return len(indents) > 1 and all(b > a for a, b in zip(indents, indents[1:], strict=False))


def quote_unquote(text: str, kw: dict) -> bool:
    """Behind every quoted phrase come words outside quotes."""
    parts = straight_quotes(text).split('"')
    if len(parts) < 3 or len(parts) % 2 == 0:
        return False
    return all(words(after) for after in parts[2::2])


def list_of_items(text: str, kw: dict) -> bool:
    """At least two items behind the separator, and no other bullets."""
    separator = kw["sep"]
    others = [line for line in lines(text) if not line.startswith(separator) and _OTHER_BULLET.match(line)]
    return text.count(separator) > 1 and not others


def thesis(text: str, kw: dict) -> bool:
    """Every section begins in italics; sections stand below headings, or are the paragraphs where there are none."""
    found = lines(text)
    starts = [i for i, line in enumerate(found) if _HEADING.match(line)]
    if starts:
        sections = ["\n".join(found[i + 1 : j]) for i, j in zip(starts, [*starts[1:], len(found)], strict=True)]
    else:
        sections = paragraphs(text)
    return bool(sections) and all(_ITALIC_START.match(section) for section in sections)


def sub_bullets(text: str, kw: dict) -> bool:
    """Each bullet * is followed by one or more sub-bullets -."""
    marks = "".join(line[0] for line in lines(text) if line[:2] in ("* ", "- "))
    return re.fullmatch(r"(?:\*-+)+", marks) is not None


def no_bullets_bullets(text: str, kw: dict) -> bool:
    first = re.search(r"^[ \t]*\*\s", text, re.MULTILINE)
    if first is None:
        return False
    before, after = text[: first.start()], text[first.start() :]
    ended = sum(sentence.endswith(".") for sentence in sentences(before))
    return ended >= 2 and len(re.findall(r"^[ \t]*\*\s", after, re.MULTILINE)) >= 2


def title_case(text: str, kw: dict) -> bool:
    found = words(text)
    if not found or not found[0][0].isupper() and found[0][0].isalpha():
        return False
    return all(word[0].isupper() or not word[0].isalpha() or word in MINOR_WORDS for word in found)


def output_template(text: str, kw: dict) -> bool:
    answer, _, rest = text.partition("My Conclusion:")
    conclusion, _, outlook = rest.partition("Future Outlook:")
    answer = answer.strip()
    parts = (answer.removeprefix("My Answer:"), conclusion, outlook)
    return answer.startswith("My Answer:") and all(part.strip() for part in parts)


def no_whitespace(text: str, kw: dict) -> bool:
    return not re.search(r"\s", text)


def repeat_change(text: str, kw: dict) -> bool:
    """The request again, its first word changed and nothing else."""
    wanted, given = kw["prompt_to_repeat"].split(), text.split()
    return given[1:] == wanted[1:] and given[:1] != wanted[:1]


def repeat_simple(text: str, kw: dict) -> bool:
    return text.strip().lower() == _SIMPLE_REQUEST.lower()


def repeat_span(text: str, kw: dict) -> bool:
    """The words n_start to n_end of the request, counted from 0, both included."""
    wanted = kw["prompt_to_repeat"].split()[int(kw["n_start"]) : int(kw["n_end"]) + 1]
    return [bare(word) for word in text.split()] == [bare(word) for word in wanted]


CHECKS = {
    "format:parentheses": parentheses,
    "format:quotes": quotes,
    "format:options": options,
    "format:newline": newline,
    "format:emoji": emoji,
    "format:line_indent": line_indent,
    "format:quote_unquote": quote_unquote,
    "format:list": list_of_items,
    "format:thesis": thesis,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "format:no_whitespace": no_whitespace,
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": repeat_simple,
    "repeat:repeat_span": repeat_span,
}
