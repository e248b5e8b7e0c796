"""The median of a few measurements and an interval for it that assumes nothing about how they are spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.95
ENOUGH = 6
"""So many measurements it takes for an interval: of five, even the least and the greatest miss the median too often."""


class Interval(NamedTuple):
    """A median, and between what the true one lies with a probability of at least :data:`LEVEL`, from ENOUGH on."""

    median: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """The median between two of the values, which are as close to each other as the level allows.

    The true median lies outside of the k-th value from either end if fewer than k of n values fall on one side of it,
    each of which does so with probability 1/2. Of fewer than ENOUGH values, these are the least and the greatest.
    """
    ordered, n = sorted(values), len(values)
    k = 1
    while k < n / 2 and 2 * sum(math.comb(n, below) for below in range(k + 1)) / 2**n <= 1 - LEVEL:
        k += 1
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k])
