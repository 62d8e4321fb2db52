"""The reward of the SmolLM2 example: reasoning-gym's own scorer on the answer found in the response.

Extraction, deliberately simple (`extract_answer`): end markers and surrounding white space go away; if the label is a
number, the answer is the last number of the response, in digits or as a small word ("17 + 5 = 22." -> "22", "it appears
once" -> "1"); otherwise it is the first line without quotes and a final full stop. The scorer of the row's data set (`metadata["source_dataset"]`) then gives 0 to 1; several
give partial credit below 1 for a wrong but well-formed answer, which is cut to 0 here so that reward means "right".
"""

from __future__ import annotations

import functools
import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WORDS = {"once": "1", "twice": "2"}
WORDS |= {w: str(n) for n, w in enumerate("zero one two three four five six seven eight nine ten".split())}
NUMBER_OR_WORD = re.compile(rf"{NUMBER.pattern}|\b(?:{'|'.join(WORDS)})\b", re.I)


async def reward_func(args, sample, **kwargs) -> float:
    """--custom-rm-path: 1.0 for a right answer, else 0.0."""
    answer = extract_answer(sample.response, str(sample.label))
    return float(scorer(sample.metadata["source_dataset"])(answer, sample.metadata["entry"]) >= 1.0)


def extract_answer(response: str, label: str) -> str:
    """The part of a response that is graded.

    >>> extract_answer("The sum of 17 and 5 is 22.<|im_end|>", "22")
    '22'
    >>> extract_answer(" 'olleh'.<|im_end|>", "olleh")
    'olleh'
    """
    text = re.sub(r"<\|.*?\|>", "", response).strip()
    if NUMBER.fullmatch(label):
        numbers = NUMBER_OR_WORD.findall(text) or [""]
        return WORDS.get(numbers[-1].lower(), numbers[-1].replace(",", ""))
    first_line = text.splitlines()[0] if text else ""
    return first_line.strip().rstrip(".").strip("'\"` ")


@functools.cache
def scorer(dataset: str):
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)
