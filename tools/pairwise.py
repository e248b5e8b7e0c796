"""Choose few combinations of factors in which every two values meet."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

Row = tuple[str, ...]
#: Two factors, by position, with a value of each.
Pair = tuple[int, str, int, str]


def pairs(row: Row) -> set[Pair]:
    """Every two values of a row, with their places."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def pairwise(factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Rows of one value a factor that hold every pair of values that any allowed row holds.

    Greedy, hence not the fewest there could be: each row is one of those with the most pairs that no row before it has,
    so early rows differ much from each other. Among equals their hash decides, so that no value is favoured, and equal
    arguments give equal rows.

    Args:
        factors: names and values.
        allowed: whether a row, with its values in the order of `factors`, may be chosen.
    """
    candidates = sorted((row for row in itertools.product(*factors.values()) if allowed(row)), key=_shuffled)
    held = [pairs(row) for row in candidates]
    missing: set[Pair] = set().union(*held)
    # A row's gain only falls, so one that still has the gain it was filed under is the best.
    queue = [(-len(found), index) for index, found in enumerate(held)]
    heapq.heapify(queue)
    chosen: list[Row] = []
    while missing:
        filed, index = heapq.heappop(queue)
        gain = len(held[index] & missing)
        if gain == -filed:
            chosen.append(candidates[index])
            missing -= held[index]
        elif gain:
            heapq.heappush(queue, (-gain, index))
    return chosen


def _shuffled(row: Row) -> bytes:
    return hashlib.sha256("\0".join(row).encode()).digest()
