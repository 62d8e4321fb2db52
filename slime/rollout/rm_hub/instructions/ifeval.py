"""The 25 verifiable instructions of IFEval (Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models").

Each check takes the response and the instruction's arguments under the names of the data set, and returns whether the response
follows it. A missing argument is a KeyError that the caller names.
"""

from __future__ import annotations

import json
import re

from slime.rollout.rm_hub.instructions.language import language_of
from slime.rollout.rm_hub.instructions.text import paragraphs, sentences, straight_quotes, words


def compares(count: int, relation: str, limit: int) -> bool:
    """Return whether a count is "at least" or "less than" a limit.

    Raises: ValueError for another relation.
    """
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r}: expected 'at least' or 'less than'")
    return count >= limit if relation == "at least" else count < limit


def number_of(text: str, phrase: str) -> int:
    """Return how often a phrase occurs, in any case, also inside words."""
    return text.lower().count(phrase.lower()) if phrase else 0


def keywords_existence(text: str, kw: dict) -> bool:
    return all(number_of(text, keyword) > 0 for keyword in kw["keywords"])


def keywords_frequency(text: str, kw: dict) -> bool:
    return compares(number_of(text, kw["keyword"]), kw["relation"], kw["frequency"])


def forbidden_words(text: str, kw: dict) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in kw["forbidden_words"])


def letter_frequency(text: str, kw: dict) -> bool:
    return compares(number_of(text, kw["letter"]), kw["let_relation"], kw["let_frequency"])


def response_language(text: str, kw: dict) -> bool:
    return language_of(text) in (kw["language"], None)


def number_sentences(text: str, kw: dict) -> bool:
    return compares(len(sentences(text)), kw["relation"], kw["num_sentences"])


def number_words(text: str, kw: dict) -> bool:
    return compares(len(re.findall(r"\w+", text)), kw["relation"], kw["num_words"])


def number_paragraphs(text: str, kw: dict) -> bool:
    """Paragraphs are separated by ***; an empty one between two separators is none."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[bool(not parts[0]) : len(parts) - bool(not parts[-1])]
    return all(inner) and len(inner) == kw["num_paragraphs"]


def nth_paragraph_first_word(text: str, kw: dict) -> bool:
    parts, position = paragraphs(text), int(kw["nth_paragraph"])
    if len(parts) != kw["num_paragraphs"] or not 1 <= position <= len(parts):
        return False
    return (
        re.split(r"[.,?!'\"\s]", parts[position - 1].lstrip("'\"").lower(), maxsplit=1)[0] == kw["first_word"].lower()
    )


def number_placeholders(text: str, kw: dict) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= kw["num_placeholders"]


def postscript(text: str, kw: dict) -> bool:
    """The marker starts the postscript: P.S. and P.P.S also with other dots and spaces."""
    letters = re.sub(r"[^a-z]", "", kw["postscript_marker"].lower())
    if letters in ("ps", "pps"):
        pattern = r"\.?\s?".join(letters) + r"\.?"
    else:
        pattern = re.escape(kw["postscript_marker"].strip())
    return re.search(rf"(?:^|\s){pattern}", text, re.IGNORECASE) is not None


def number_bullet_lists(text: str, kw: dict) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*[^*\n]|-[^-\n])", text, re.MULTILINE)) == kw["num_bullets"]


def constrained_response(text: str, kw: dict) -> bool:
    return any(f"my answer is {choice}." in text.lower() for choice in ("yes", "no", "maybe"))


def number_highlighted_sections(text: str, kw: dict) -> bool:
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    return sum(bool(part.strip("* ")) for part in found) >= kw["num_highlights"]


def multiple_sections(text: str, kw: dict) -> bool:
    return len(re.findall(rf"{re.escape(kw['section_spliter'].strip())}\s+\d+", text)) >= kw["num_sections"]


def json_format(text: str, kw: dict) -> bool:
    body = re.sub(r"\A```[a-zA-Z]*", "", text.strip()).removesuffix("```")
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str, kw: dict) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^<>\n]+)>>", text))


def two_responses(text: str, kw: dict) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeat_prompt(text: str, kw: dict) -> bool:
    return text.strip().lower().startswith(kw["prompt_to_repeat"].strip().lower())


def end_checker(text: str, kw: dict) -> bool:
    return text.strip().strip('"').lower().endswith(kw["end_phrase"].strip().lower())


def capital_word_frequency(text: str, kw: dict) -> bool:
    count = sum(word.isupper() for word in words(text))
    return compares(count, kw["capital_relation"], kw["capital_frequency"])


def english_capital(text: str, kw: dict) -> bool:
    return text.isupper() and language_of(text) in ("en", None)


def english_lowercase(text: str, kw: dict) -> bool:
    return text.islower() and language_of(text) in ("en", None)


def no_comma(text: str, kw: dict) -> bool:
    return "," not in text


def quotation(text: str, kw: dict) -> bool:
    text = straight_quotes(text.strip())
    return len(text) > 2 and text[0] == text[-1] == '"'


CHECKS = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keywords_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
