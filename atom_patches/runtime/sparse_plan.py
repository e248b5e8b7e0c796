"""Which tokens the rows of a step may select from, and where those lie: plans for sparse attention over a paged cache.

Three spaces of indices meet here, and each name says which one it is of:

    position    a token within its request, counted from 0; what is selected
    slot        a token within the caches: slot = page * page_size + place
    row         a token among those that the step computes

The engine's table says the slot of each position of each request. Pages hold consecutive positions, so one entry per
page says it all: the page table, which kernels read. Padding is negative in whatever names a request or a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def page_table(slots_of: Tensor, requests: Tensor | None, pages: int, page_size: int) -> Tensor:
    """The pages [requests, pages] of requests, int32.

    Args:
        slots_of: [any, at least (pages - 1) * page_size + 1]: the engine's table, one line per request.
        requests: the lines wanted; None: all of them, in place where a page is one token.
        pages: how many a line gets.
    """
    firsts = slots_of[:, : pages * page_size : page_size]
    lines = firsts if requests is None else firsts.index_select(0, requests)
    return lines if page_size == 1 else lines // page_size


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


def owners_of(counts: Tensor, rows: int) -> Tensor:
    """For each of `rows` rows the request that it belongs to, int32; `counts` [requests] says how many each has."""
    numbers = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device)
    return torch.repeat_interleave(numbers, counts, output_size=rows)


def visible_lengths(owners: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
    """How many tokens each row sees, itself the last, int32.

    Args:
        owners: [rows] int32, as `owners_of` gives them.
        counts: [requests]: rows of each request, which are its last tokens.
        lengths: [requests]: tokens of each request, those of this step included.
    """
    ends = counts.cumsum(0)
    rows = torch.arange(owners.shape[0], device=owners.device)
    which = owners.long()
    return (lengths[which] - ends[which] + rows + 1).int()


def boundaries(lengths: Tensor) -> Tensor:
    """[N] lengths -> [N + 1] int32: where each begins, and where the last ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


@dataclass(frozen=True)
class Group:
    """Requests whose keys are gathered together, and the rows that then select from them, some at a time.

    Attributes:
        first, last: requests first up to last.
        keys: tokens of all of them.
        chunks: rows (begin, end), of all that the step computes.
    """

    first: int
    last: int
    keys: int
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Workspace:
    """What may be held at once while rows select, in bytes, and what it is spent on.

    Attributes:
        budget: the bound. One row and the keys of one request are held even if they are more.
        per_row: bytes of a row, whatever the number of keys.
        per_pair: bytes of a row and a key.
        per_key: bytes of a gathered key.
    """

    budget: int
    per_row: int
    per_pair: int = 4
    per_key: int = 132

    def rows_with(self, keys: int) -> int:
        """How many rows fit beside so many gathered keys."""
        left = self.budget - keys * self.per_key
        return max(1, left // (self.per_row + keys * self.per_pair))


def prefill_groups(counts: Sequence[int], lengths: Sequence[int], workspace: Workspace) -> list[Group]:
    """Deal the rows of a ragged batch into groups and chunks that keep within the workspace.

    Args:
        counts: rows of each request.
        lengths: tokens of each request, those rows included.
    """
    groups: list[Group] = []
    first = row = 0
    while first < len(counts):
        last, keys, rows = first + 1, lengths[first], counts[first]
        while last < len(counts) and rows + counts[last] <= workspace.rows_with(keys + lengths[last]):
            keys, rows = keys + lengths[last], rows + counts[last]
            last += 1
        if rows:
            groups.append(Group(first, last, keys, _chunks(row, row + rows, workspace.rows_with(keys))))
        first, row = last, row + rows
    return groups


def _chunks(begin: int, end: int, most: int) -> tuple[tuple[int, int], ...]:
    return tuple((at, min(at + most, end)) for at in range(begin, end, most))


def selection_rows(running: int, per_request: int, prefill: int) -> int:
    """Rows of the buffer of selected slots: what a decode step, or a chunk of prefill, needs at most.

    Args:
        running: requests that run at once, at most.
        per_request: rows of a request in a decode step: 1, or the tokens that are verified at once.
        prefill: rows of a prefill step.
    """
    return max(running * per_request, prefill, 1)


__all__ = [
    "Group",
    "Workspace",
    "boundaries",
    "owners_of",
    "page_table",
    "pages_for",
    "prefill_groups",
    "selection_rows",
    "visible_lengths",
]
