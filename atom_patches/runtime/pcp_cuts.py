"""Where a pool of rows is cut into the ranks' slices.

Two cuts of the same pool, with slices of the same length:

- *contiguous*: one piece a rank, in the order of the ranks. A recurrence that runs along the rows needs it.
- *zigzag*: two pieces a rank. The pool is cut into twice as many chunks as there are ranks, and rank ``r`` gets chunk
  ``r`` counted from the front and chunk ``r`` counted from the back. A row of causal attention costs as much as there
  are rows before it, so each rank gets a cheap chunk and a dear one, and all ranks of one long prompt work alike::

      pool         0    1    2    3    4    5    6    7
      contiguous   rank 0    rank 1    rank 2    rank 3
      zigzag       r0   r1   r2   r3   r3   r2   r1   r0
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

Layout = Literal["contiguous", "zigzag"]
Piece = tuple[int, int]


@dataclass(frozen=True)
class PoolCut:
    """The pieces of a pool that each rank gets.

    Attributes:
        slice_size: rows of every rank, padding included.
        pieces: per rank, its pieces as pool rows ``[start, end)``: ascending, apart from each other, none empty.
    """

    slice_size: int
    pieces: tuple[tuple[Piece, ...], ...]

    def rows(self, rank: int) -> int:
        """Pool rows of ``rank``, without padding."""
        return sum(end - start for start, end in self.pieces[rank])

    def place(self, row: int) -> tuple[int, int]:
        """The rank that has a pool row, and the row's position in the rank's slice."""
        start, rank, offset = self._starts[bisect_right(self._starts, (row, len(self.pieces))) - 1]
        return rank, offset + row - start

    def pool_rows(self, rank: int) -> torch.Tensor:
        """The pool rows of ``rank`` in order, int64, without padding."""
        return concat_ranges(self.pieces[rank])

    def gathered_rows(self) -> torch.Tensor:
        """For each pool row its index in all ranks' slices laid end to end, int64 ``[pool rows]``."""
        return concat_ranges(
            [
                (first := rank * self.slice_size + offset, first + end - start)
                for (start, rank, offset), end in zip(self._starts, self._ends, strict=True)
            ]
        )

    @cached_property
    def _starts(self) -> list[tuple[int, int, int]]:
        """Every piece in the pool's order: first pool row, rank, position in the rank's slice."""
        found: list[tuple[int, int, int]] = []
        for rank, pieces in enumerate(self.pieces):
            offset = 0
            for start, end in pieces:
                found.append((start, rank, offset))
                offset += end - start
        return sorted(found)

    @property
    def _ends(self) -> list[int]:
        return sorted(end for pieces in self.pieces for _, end in pieces)


def cut_pool(pool_size: int, world_size: int, layout: Layout) -> PoolCut:
    """Cut ``pool_size`` rows into slices of equal length; rows that are missing to that are padding."""
    slice_size = -(-pool_size // world_size)
    if layout == "contiguous":
        ends = [[slice_size * (rank + 1)] for rank in range(world_size)]
        starts = [[slice_size * rank] for rank in range(world_size)]
    else:
        # An odd slice has one row more in front, where a row is cheap.
        front, back = -(-slice_size // 2), slice_size // 2
        middle = front * world_size
        starts = [[front * rank, middle + back * (world_size - 1 - rank)] for rank in range(world_size)]
        ends = [[first + front, last + back] for first, last in starts]
    return PoolCut(
        slice_size,
        tuple(
            _tidy([(s, min(e, pool_size)) for s, e in zip(*rank_bounds, strict=True)])
            for rank_bounds in zip(starts, ends, strict=True)
        ),
    )


def concat_ranges(ranges: list[Piece] | tuple[Piece, ...]) -> torch.Tensor:
    """The numbers of all ranges ``[start, end)`` in order, int64."""
    if not ranges:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(start, end, dtype=torch.int64) for start, end in ranges])


def _tidy(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Without empty pieces, and with adjacent ones as one."""
    tidy: list[Piece] = []
    for start, end in pieces:
        if start >= end:
            continue
        if tidy and tidy[-1][1] == start:
            start = tidy.pop()[0]
        tidy.append((start, end))
    return tuple(tidy)
