"""The `f1` reward type: token-overlap F1 of short answers, as in SQuAD.

Normalisation: lower case, punctuation deleted, the articles a/an/the dropped, spaces collapsed.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_EXACT = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """Return the normalised text.

    >>> normalize_answer("The Big, Red Dog."), normalize_answer("a.b,c!"), normalize_answer("the")
    ('big red dog', 'abc', '')
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth) -> float:
    """Return the F1 of the two token multisets; yes, no and noanswer must match exactly."""
    if prediction is None or ground_truth is None:
        return 0.0
    predicted, truth = normalize_answer(prediction), normalize_answer(str(ground_truth))
    if (predicted in _EXACT or truth in _EXACT) and predicted != truth:
        return 0.0
    predicted_tokens, truth_tokens = predicted.split(), truth.split()
    common = sum((Counter(predicted_tokens) & Counter(truth_tokens)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted_tokens), common / len(truth_tokens)
    return 2 * precision * recall / (precision + recall)
