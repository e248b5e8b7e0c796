"""The plan of one prefill-context-parallel step.

A step's requests fall in two groups. Single-token requests (decodes) are *replicated*: every rank runs their
rows. The rows of all longer requests, laid end to end, form the *pool*; the pool is cut into slices of equal
length, wherever a request begins or ends, so every rank runs the same number of rows (the last ones padded).

The slices are contiguous, unless the model has full attention only and a zigzag cut balances it (`pcp_cuts.py`). With
contiguous slices a request touches neighbouring ranks only, and at most one request crosses each cut: a recurrent
layer has to hand exactly one state from a rank to the next.

Everything is computed on the host from the *global* query lengths, so all ranks compute the same plan and no
rank decides alone whether to enter a collective.

Row names used throughout:

- *global row*: index in the step's flat batch, request after request, as the engine lays it out;
- *pool row*: index in the pool;
- *local row*: index on one rank: its replicated rows, then its slice of the pool, then the slice's padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from atom_patches.runtime.pcp_cuts import Layout, PoolCut, concat_ranges, cut_pool


@dataclass(frozen=True)
class Segment:
    """Rows ``[start, end)`` of one request's query that one rank runs.

    Attributes:
        request: index of the request in the step's batch.
        start: first row, relative to the request's query in this step.
        end: one past the last row.
        query_len: rows of the whole request in this step.
    """

    request: int
    start: int
    end: int
    query_len: int

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def starts_request(self) -> bool:
        return self.start == 0

    @property
    def ends_request(self) -> bool:
        return self.end == self.query_len


@dataclass(frozen=True)
class PcpPlan:
    """How one step's rows are spread over the ranks of a prefill-context-parallel group.

    Attributes:
        world_size: ranks in the group, at least 2.
        query_lens: rows of every request in this step, in batch order, each at least 1.
        layout: how the pool is cut. What is said about states holds for contiguous slices only.
    """

    world_size: int
    query_lens: tuple[int, ...]
    layout: Layout = "contiguous"

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """Requests that every rank runs."""
        return tuple(i for i, rows in enumerate(self.query_lens) if rows == 1)

    @cached_property
    def pooled(self) -> tuple[int, ...]:
        """Requests whose rows are spread over the ranks."""
        return tuple(i for i, rows in enumerate(self.query_lens) if rows > 1)

    @property
    def pool_size(self) -> int:
        return self.pool_start_loc[-1]

    @property
    def num_tokens(self) -> int:
        return self.query_start_loc[-1]

    @cached_property
    def cut(self) -> PoolCut:
        """The pool rows of each rank."""
        return cut_pool(self.pool_size, self.world_size, self.layout)

    @property
    def slice_size(self) -> int:
        """Pool rows of each rank, padding included."""
        return self.cut.slice_size

    @property
    def rows_per_rank(self) -> int:
        """Local rows of each rank, padding included; equal on all ranks."""
        return len(self.replicated) + self.slice_size

    def slice_bounds(self, rank: int) -> tuple[int, int]:
        """Pool rows ``[start, end)`` of ``rank``'s contiguous slice; empty on a rank past the pool's end."""
        assert self.layout == "contiguous", "a zigzag slice has two pieces: ask the cut"
        pieces = self.cut.pieces[rank]
        return pieces[0] if pieces else (self.pool_size, self.pool_size)

    def padding(self, rank: int) -> int:
        """Padded rows at the end of ``rank``'s local rows."""
        return self.slice_size - self.cut.rows(rank)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments of ``rank``'s slice in order; each request at most once in a contiguous slice."""
        return self._segments_by_rank[rank]

    @cached_property
    def _segments_by_rank(self) -> tuple[tuple[Segment, ...], ...]:
        # Every recurrent layer asks again.
        return tuple(self.segments_of(self.cut, rank) for rank in range(self.world_size))

    def segments_of(self, cut: PoolCut, rank: int) -> tuple[Segment, ...]:
        """The segments of ``rank``'s slice by any cut of this step's pool, in the pool's order."""
        found: list[Segment] = []
        for first, last in cut.pieces[rank]:
            position = bisect_right(self.pool_start_loc, first) - 1
            while self.pool_start_loc[position] < last:
                request, offset = self.pooled[position], self.pool_start_loc[position]
                rows = self.query_lens[request]
                found.append(Segment(request, max(first - offset, 0), min(last - offset, rows), rows))
                position += 1
        return tuple(found)

    def receives_state(self, rank: int) -> bool:
        """Whether ``rank``'s first segment goes on from the previous rank's last one."""
        segments = self.segments(rank)
        return bool(segments) and not segments[0].starts_request

    def sends_state(self, rank: int) -> bool:
        """Whether ``rank``'s last segment goes on on the next rank."""
        segments = self.segments(rank)
        return bool(segments) and not segments[-1].ends_request

    def finished(self, rank: int) -> tuple[int, ...]:
        """Pooled requests whose last row of this step ``rank`` runs, in batch order."""
        return tuple(s.request for s in self.segments(rank) if s.ends_request)

    @cached_property
    def query_start_loc(self) -> tuple[int, ...]:
        """Global row at which each request starts, and the total; length requests + 1."""
        return _cumulative(self.query_lens)

    @cached_property
    def pool_start_loc(self) -> tuple[int, ...]:
        """Pool row at which each pooled request starts, and the pool's size; length pooled + 1."""
        return _cumulative(self.query_lens[i] for i in self.pooled)

    @cached_property
    def group_order(self) -> tuple[int, ...]:
        """Position of every request within its own group: among the replicated, or among the pooled."""
        order = [0] * len(self.query_lens)
        for group in (self.replicated, self.pooled):
            for position, request in enumerate(group):
                order[request] = position
        return tuple(order)

    def replicated_rows(self) -> torch.Tensor:
        """Global rows of the replicated requests, int64, in batch order."""
        return torch.tensor([self.query_start_loc[i] for i in self.replicated], dtype=torch.int64)

    def pool_rows(self) -> torch.Tensor:
        """Global row of every pool row, int64 ``[pool_size]``."""
        return concat_ranges([(self.query_start_loc[i], self.query_start_loc[i + 1]) for i in self.pooled])

    def local_rows(self, rank: int) -> torch.Tensor:
        """Global row of every local row, int64 ``[rows_per_rank]``; padding repeats the first pool row."""
        pool = self.pool_rows()
        padding = pool[:1].expand(self.padding(rank))
        return torch.cat([self.replicated_rows(), pool[self.cut.pool_rows(rank)], padding])

    def gathered_rows(self) -> torch.Tensor:
        """For each pooled global row its index in all ranks' slices laid end to end, int64 ``[num_tokens]``.

        0 for replicated rows, which are not gathered.
        """
        places = torch.zeros(self.num_tokens, dtype=torch.int64)
        places[self.pool_rows()] = self.cut.gathered_rows()
        return places

    def exchange(self, rows: Sequence[int]) -> RowExchange:
        """Plan an all-gather that makes the given global rows known on every rank.

        Args:
            rows: distinct global rows, for instance those whose logits are needed.
        """
        return RowExchange.of(self, rows)


@dataclass(frozen=True)
class RowExchange:
    """Which local rows each rank contributes so that all ranks learn a set of global rows.

    Attributes:
        send_rows: per rank, the local rows to contribute; all of one length, at least 1.
        global_rows: the requested rows that are pooled, int64.
        gathered_rows: for each of ``global_rows``, its index in the rank-major gathered tensor, int64.
        replicated_global: the requested rows that every rank has already, int64.
        replicated_local: for each of ``replicated_global``, its local row, int64.
    """

    send_rows: tuple[tuple[int, ...], ...]
    global_rows: torch.Tensor
    gathered_rows: torch.Tensor
    replicated_global: torch.Tensor
    replicated_local: torch.Tensor

    @classmethod
    def of(cls, plan: PcpPlan, rows: Sequence[int]) -> RowExchange:
        sends: list[list[int]] = [[] for _ in range(plan.world_size)]
        pooled: list[int] = []
        places: list[tuple[int, int]] = []
        replicated: list[int] = []
        local_of_replicated: list[int] = []
        for row in rows:
            request = bisect_right(plan.query_start_loc, row) - 1
            order = plan.group_order[request]
            if plan.query_lens[request] == 1:
                replicated.append(row)
                local_of_replicated.append(order)
                continue
            position = plan.pool_start_loc[order] + row - plan.query_start_loc[request]
            rank, offset = plan.cut.place(position)
            pooled.append(row)
            places.append((rank, len(sends[rank])))
            sends[rank].append(len(plan.replicated) + offset)
        width = max(1, *(len(sent) for sent in sends))
        return cls(
            send_rows=tuple(tuple(sent + [0] * (width - len(sent))) for sent in sends),
            global_rows=torch.tensor(pooled, dtype=torch.int64),
            gathered_rows=torch.tensor([rank * width + place for rank, place in places], dtype=torch.int64),
            replicated_global=torch.tensor(replicated, dtype=torch.int64),
            replicated_local=torch.tensor(local_of_replicated, dtype=torch.int64),
        )


def plan_step(query_lens: Sequence[int], world_size: int, min_rows: int) -> PcpPlan | None:
    """Decide from global lengths whether a step is split, and how.

    Args:
        query_lens: rows of every request in this step, in batch order.
        world_size: ranks in the prefill-context-parallel group.
        min_rows: least pool rows a rank must get for a split to pay.

    Returns:
        The plan, or None if every rank runs the whole step (a *replicated* step).
    """
    if world_size < 2 or max(query_lens, default=0) < 2:  # most steps are decodes alone
        return None
    plan = PcpPlan(world_size, tuple(int(rows) for rows in query_lens))
    return plan if plan.pool_size >= world_size * max(min_rows, 1) else None


def most_rows(max_tokens: int, max_requests: int, world_size: int, min_rows: int) -> int:
    """The most local rows that any admissible step puts on one rank.

    A split step runs its decodes in full and a slice of the rest; a replicated step runs everything, but its
    pool is smaller than ``world_size * min_rows``.

    Args:
        max_tokens: most rows the scheduler admits in a step.
        max_requests: most requests in a step, so the most decodes.
        world_size: ranks in the prefill-context-parallel group.
        min_rows: as for :func:`plan_step`.
    """
    decodes = min(max_requests, max_tokens)
    split = decodes + -(-(max_tokens - decodes) // world_size)
    replicated = min(max_tokens, decodes + world_size * max(min_rows, 1) - 1)
    return max(split, replicated)


def _cumulative(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))
