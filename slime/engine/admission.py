"""Which requests are read together: equal token sequences once, similar lengths in one batch.

The samples of one prompt usually arrive together; they form a family whose tokens are read once and whose cache rows are
copied. Knows no tensors.
"""

from __future__ import annotations

from slime.engine.requests import Request

PREFILL_TOKENS = 8192
"""Prompt tokens read between two decode steps; one longer prompt goes alone."""
FREE_PADDING = 64
"""Up to this length any two sequences may share a batch; above it the longer may be twice the shorter."""

Family = list[Request]
"""Requests with the same tokens to read, either all with output to come or all without."""


class PrefillBudget:
    """Counts the tokens of one admission round, equal sequences once."""

    def __init__(self) -> None:
        self._seen: set[tuple] = set()
        self._left = PREFILL_TOKENS

    def take(self, request: Request) -> bool:
        """Return whether the request may join the round, and count it if so. The first always may."""
        key = _family_key(request)
        if key in self._seen:
            return True
        cost = num_unread([request])
        if self._seen and cost > self._left:
            return False
        self._seen.add(key)
        self._left -= cost
        return True


def prefill_groups(requests: list[Request]) -> list[list[Family]]:
    """Split requests into batches of families; within a batch padding is bounded."""
    families: dict[tuple, Family] = {}
    for request in requests:
        families.setdefault(_family_key(request), []).append(request)
    groups: list[list[Family]] = []
    for family in sorted(families.values(), key=lambda f: (is_scoring(f), num_kept(f) > 0, num_unread(f))):
        if groups and _fits(groups[-1], family):
            groups[-1].append(family)
        else:
            groups.append([family])
    return groups


def sequence_length(family: Family) -> int:
    """Return how many tokens the family's sequence has so far."""
    return len(family[0].prompt_ids) + len(family[0].output_ids)


def num_kept(family: Family) -> int:
    """Return how many first tokens of the family are kept from earlier requests."""
    return min(0 if request.prefix is None else request.prefix.length for request in family)


def num_unread(family: Family) -> int:
    """Return how many tokens the model has to read for the family."""
    return sequence_length(family) - num_kept(family)


def is_scoring(family: Family) -> bool:
    """Return whether the family only asks for log-probs of its prompt."""
    return family[0].params.max_new_tokens == 0


def _fits(group: list[Family], family: Family) -> bool:
    length = num_unread(family)
    return (
        is_scoring(group[0]) == is_scoring(family)
        and (num_kept(group[0]) > 0) == (num_kept(family) > 0)
        and length * (len(group) + 1) <= PREFILL_TOKENS
        and (length <= FREE_PADDING or length <= 2 * num_unread(group[0]))
    )


def _family_key(request: Request) -> tuple:
    return (request.params.max_new_tokens == 0, request.adapter_number, *request.prompt_ids, *request.output_ids)
