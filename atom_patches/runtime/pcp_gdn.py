"""GatedDeltaNet's recurrence over the ranks of a split step: what ranks tell each other, and how it composes.

Whatever state ``S`` a segment of rows starts from, the rows do the same to it (one value head, ``S`` of ``[V, K]``)::

    S_end = N + S_start @ E          N [V, K], E [K, K]

A cut lies inside one request at most, so only a rank's *last* segment matters to the ranks after it. Where that segment
begins its request, its end state is known at once; where it is the middle of a request, it is the rank's only segment,
and the rank finds ``N`` and ``E``. All do so at the same time, and then each rank composes the state that it goes on
from. A convolution reaches back a few rows only, which are exchanged as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_patches.runtime.pcp import PcpPlan


@dataclass(frozen=True)
class HaloExchange:
    """Which convolution inputs cross from rank to rank, and where each is found afterwards.

    A causal convolution of ``past + 1`` taps needs the ``past`` rows before a rank's first segment, if that goes on
    with a request. Slices may be shorter than that, so these rows may lie on several ranks, or before this step. Each
    rank finds them in a *table*: first what the ranks sent, rank by rank, then the ``past`` earlier rows of that
    request.

    Attributes:
        send_rows: per rank, the local rows to send; equally many on every rank, at least 1.
        halos: per rank, the table rows before its slice, oldest first, int64 ``[past]``; empty if it goes on with none.
    """

    send_rows: tuple[tuple[int, ...], ...]
    halos: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, plan: PcpPlan, past: int) -> HaloExchange:
        """Plan the exchange for a convolution that takes ``past`` rows before its own."""
        cuts = {rank: plan.segments(rank)[0] for rank in ranks_that_go_on(plan)}
        wanted = sorted({row for s in cuts.values() for row in _before(plan, s.request, s.start, past)})
        exchange = plan.exchange(wanted)
        sent = len(exchange.send_rows[0]) * plan.world_size
        # Wanted rows are all pooled, so the exchange keeps their order; the earlier rows are counted behind them.
        place = {row: int(at) for row, at in zip(wanted, exchange.gathered_rows, strict=True)}

        def table_row(request: int, row: int) -> int:
            # Row -1 is the newest of the request's earlier rows, so the last of them.
            return place[plan.query_start_loc[request] + row] if row >= 0 else sent + past + row

        halos = (
            [table_row(cuts[rank].request, row) for row in range(cuts[rank].start - past, cuts[rank].start)]
            if rank in cuts
            else []
            for rank in range(plan.world_size)
        )
        return cls(exchange.send_rows, tuple(torch.tensor(rows, dtype=torch.int64) for rows in halos))


def ranks_that_go_on(plan: PcpPlan) -> tuple[int, ...]:
    """Ranks whose first segment goes on with a request of the rank before."""
    return tuple(rank for rank in range(plan.world_size) if plan.receives_state(rank))


def entering_state(plan: PcpPlan, rank: int, ends: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """The state that the first segment of ``rank`` goes on from, ``[heads, V, K]``.

    Args:
        rank: one that goes on with a request.
        ends: ``[ranks, heads, V, K]``: the state after each rank's last segment, from the request's own state where the
            segment begins the request, else from zero.
        maps: ``[ranks, heads, K, K]``: what that segment does to the state it goes on from; not read where it begins
            the request. Neither is read of ranks whose last segment ends its request.
    """
    first = rank - 1
    while plan.receives_state(first) and len(plan.segments(first)) == 1:
        first -= 1
    state = ends[first]
    for between in range(first + 1, rank):
        state = torch.baddbmm(ends[between], state, maps[between])
    return state


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


def _before(plan: PcpPlan, request: int, end: int, past: int) -> range:
    """Global rows of a request before its row ``end``, none of an earlier step."""
    start = plan.query_start_loc[request]
    return range(start + max(end - past, 0), start + end)
