"""Partition weighted items into parts of nearly equal total weight.

Parts are lists of item positions, sorted. Deterministic: ties are broken by position.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence


def longest_first(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Assign items from heaviest to lightest to the currently lightest part (LPT rule).

    >>> longest_first([6, 5, 4, 1], 2)
    [[0, 3], [1, 2]]
    """
    heap = [(0.0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for item in _heaviest_first(weights):
        total, part = heapq.heappop(heap)
        parts[part].append(item)
        heapq.heappush(heap, (total + weights[item], part))
    return [sorted(part) for part in parts]


def karmarkar_karp(weights: Sequence[float], num_parts: int, equal_size: bool = False) -> list[list[int]]:
    """Partition by the largest differencing method.

    Each item starts as a candidate solution of `num_parts` parts; the two solutions with the largest spread are merged
    heaviest-with-lightest until one is left.

    Args:
        equal_size: every part gets the same number of items; `len(weights)` must be a multiple of `num_parts`.
    Returns:
        `num_parts` lists, some possibly empty when `equal_size` is off.
    Raises:
        ValueError: equal sizes are impossible.
    """
    if equal_size and len(weights) % num_parts:
        raise ValueError(f"{len(weights)} items cannot be split into {num_parts} parts of equal size")
    if not weights:
        return [[] for _ in range(num_parts)]
    heap = []
    for order, solution in enumerate(_initial_solutions(weights, num_parts if equal_size else 1)):
        heapq.heappush(heap, (-_spread(solution, num_parts), order, solution))
    order = len(heap)
    while len(heap) > 1:
        merged = _merged(heapq.heappop(heap)[2], heapq.heappop(heap)[2], num_parts)
        heapq.heappush(heap, (-_spread(merged, num_parts), order, merged))
        order += 1
    parts = [items for _, items in heap[0][2]]
    return sorted(map(sorted, parts + [[] for _ in range(num_parts - len(parts))]))


Part = tuple[float, list[int]]
"""Total weight, items."""
Solution = list[Part]
"""Parts that hold items, heaviest first; the others are empty. A thousand items are one such part each at first."""


def _initial_solutions(weights: Sequence[float], step: int) -> list[Solution]:
    items = _heaviest_first(weights)
    return [
        [(float(weights[item]), [item]) for item in items[start : start + step]] for start in range(0, len(items), step)
    ]


def _merged(first: Solution, second: Solution, num_parts: int) -> Solution:
    """Part i of the one joined with part num_parts - 1 - i of the other, empty ones included; sorted again."""
    free_first, free_second = num_parts - len(second), num_parts - len(first)  # what meets an empty part
    joined = [
        (heavy[0] + light[0], heavy[1] + light[1])
        for heavy, light in zip(first[free_first:], reversed(second[free_second:]), strict=True)
    ]
    longer, shorter = first[:free_first], second[:free_second]
    if len(longer) < len(shorter):
        longer, shorter = shorter, longer
    for part in (*shorter, *joined):
        bisect.insort(longer, part, key=_place)
    return longer


def _place(part: Part) -> tuple[float, list[int]]:
    return -part[0], part[1]


def _heaviest_first(weights: Sequence[float]) -> list[int]:
    return sorted(range(len(weights)), key=lambda item: (-weights[item], item))


def _spread(solution: Solution, num_parts: int) -> float:
    return solution[0][0] - (solution[-1][0] if len(solution) == num_parts else 0.0)
