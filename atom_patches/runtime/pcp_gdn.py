"""GatedDeltaNet's recurrence over the ranks of a split step: what ranks tell each other, and how it composes.

Whatever state ``S`` a segment of rows starts from, the rows do the same to it (one value head, ``S`` of ``[V, K]``)::

    S_end = N + S_start @ E          N [V, K], E [K, K]

So ranks find ``N`` and ``E`` of their segments at the same time, and once all are known, each rank computes every
state at every cut by itself. A convolution reaches back a few rows only, which are exchanged as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from atom_patches.runtime.pcp import PcpPlan


@dataclass(frozen=True)
class TailExchange:
    """Which convolution inputs cross from rank to rank, and where each is found afterwards.

    A causal convolution of ``past + 1`` taps needs the ``past`` rows before each segment, and leaves the last ``past``
    rows of each request as its state. Segments may be shorter than that, so these rows may lie on several ranks, or
    before this step. They are all found in one *table*: first what the ranks sent, rank by rank, then the earlier rows
    of the pooled requests, ``past`` a request.

    Attributes:
        send_rows: per rank, the local rows to send; equally many on every rank, at least 1.
        halos: per rank, the table rows before each of its segments, oldest first, int64 ``[segments, past]``.
        tails: the table rows that end each pooled request, oldest first, int64 ``[pooled, past]``.
    """

    send_rows: tuple[tuple[int, ...], ...]
    halos: tuple[torch.Tensor, ...]
    tails: torch.Tensor

    @classmethod
    def of(cls, plan: PcpPlan, past: int) -> TailExchange:
        """Plan the exchange for a convolution that takes ``past`` rows before its own."""
        wanted = sorted({row for request, end in _cuts(plan) for row in _before(plan, request, end, past)})
        exchange = plan.exchange(wanted)
        sent = len(exchange.send_rows[0]) * plan.world_size
        # Wanted rows are all pooled, so the exchange keeps their order; the earlier rows are counted behind them.
        place = {row: index for index, row in enumerate(wanted)}
        table = torch.cat([exchange.gathered_rows, sent + torch.arange(len(plan.pooled) * past)])

        def table_rows(ends: Iterable[tuple[int, int]]) -> torch.Tensor:
            rows = [entry(request, row) for request, end in ends for row in range(end - past, end)]
            return table[torch.tensor(rows, dtype=torch.int64)].view(-1, past)

        def entry(request: int, row: int) -> int:
            if row >= 0:
                return place[plan.query_start_loc[request] + row]
            # Row -1 is the newest of the request's earlier rows, so the last of them.
            return len(wanted) + (plan.group_order[request] + 1) * past + row

        return cls(
            send_rows=exchange.send_rows,
            halos=tuple(
                table_rows((s.request, s.start) for s in plan.segments(rank)) for rank in range(plan.world_size)
            ),
            tails=table_rows((request, plan.query_lens[request]) for request in plan.pooled),
        )


def states_per_rank(plan: PcpPlan) -> int:
    """The most segments of one rank: every rank sends as many states, so that all send the same."""
    return max(len(plan.segments(rank)) for rank in range(plan.world_size))


def compose(plan: PcpPlan, ends: torch.Tensor, maps: torch.Tensor) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The states at the cuts and at the requests' ends.

    Args:
        ends: ``[ranks, states_per_rank, heads, V, K]``: the state after each segment, from the request's own state
            where the segment begins the request, from zero where it goes on from the rank before.
        maps: ``[ranks, heads, K, K]``: what each rank's first segment does to the state it goes on from; not read
            where that segment begins a request.

    Returns:
        by rank, the state that its first segment goes on from, for ranks where it goes on; and the final state of every
        pooled request, ``[pooled, heads, V, K]``.
    """
    entering: dict[int, torch.Tensor] = {}
    final: list[torch.Tensor] = []
    carried = ends[0, 0]
    for rank in range(plan.world_size):
        for place, segment in enumerate(plan.segments(rank)):
            end = ends[rank, place]
            if not segment.starts_request:
                entering[rank] = carried
                end = end + carried @ maps[rank]
            if segment.ends_request:
                final.append(end)
            carried = end
    return entering, torch.stack(final)


def head_channels(key_heads: int, value_heads: int, key_size: int, value_size: int, ranks: int) -> torch.Tensor:
    """The channels of ``[queries, keys, values]`` that belong to each rank's share of the heads.

    Args:
        key_heads: heads of queries and keys; a multiple of ``ranks``. Each serves as many value heads, which lie
            together, so the shares of the value heads follow.

    Returns:
        int64 ``[ranks, channels / ranks]``: queries, keys, values of the share, in that order.
    """
    if key_heads % ranks or value_heads % key_heads:
        raise ValueError(f"{key_heads} key and {value_heads} value heads cannot be dealt out evenly over {ranks} ranks")
    keys = torch.arange(key_heads * key_size).view(ranks, -1)
    values = torch.arange(value_heads * value_size).view(ranks, -1)
    return torch.cat([keys, key_heads * key_size + keys, 2 * key_heads * key_size + values], dim=1)


def _cuts(plan: PcpPlan) -> Iterator[tuple[int, int]]:
    """The (request, row) before which rows are wanted: where a rank goes on with a request, and where one ends."""
    for rank in range(plan.world_size):
        yield from ((s.request, s.start) for s in plan.segments(rank) if not s.starts_request)
    yield from ((request, plan.query_lens[request]) for request in plan.pooled)


def _before(plan: PcpPlan, request: int, end: int, past: int) -> range:
    """Global rows of a request before its row ``end``, none of an earlier step."""
    start = plan.query_start_loc[request]
    return range(start + max(end - past, 0), start + end)
