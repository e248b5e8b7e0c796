"""Which rank answers which queries of full attention in a split step, and whether balancing them pays.

Every rank has all keys and values in its cache, so a query can be answered anywhere. With contiguous slices the last
rank of a long prompt has most of the causal attention: 3/4 of it on two ranks, where half would be fair. A zigzag cut
is fair. A model of full attention only lays its rows in zigzag from the start. A model with recurrent layers
needs contiguous rows between them, so it sends its queries to where the zigzag cut has them, and the answers back: two
all-to-alls a layer, whose bytes grow with the prompt's length while what they save grows with its square. What the
host issues for them (pcp_host.py) costs as much at any length, and decides for short prompts.

All of it follows from the step's global lengths and the model's dimensions, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from atom_patches.runtime import pcp_host
from atom_patches.runtime.link import Link
from atom_patches.runtime.pcp import PcpPlan
from atom_patches.runtime.pcp_cuts import Layout, Piece, PoolCut, concat_ranges, cut_pool


@dataclass(frozen=True)
class Machine:
    """The rates that the choice assumes; the defaults are those of an H200 with NVLink.

    Attributes:
        attention_flops: floating-point operations a second of a long prefill's attention: the median over queries of
            16,384 keys and more, 16 heads of 256, FlashAttention 3 (benchmarks/pcp-h200-2026-11-30).
        link: between the ranks.
        launch: what an operation that the host issues adds.
    """

    attention_flops: float = 707e12
    link: Link = Link()
    launch: float = pcp_host.SECONDS


@dataclass(frozen=True)
class AttentionShape:
    """The full-attention layers as one rank runs them.

    Attributes:
        query_heads: heads of this tensor-parallel rank.
        head_size: elements of a head.
        element_bytes: bytes of an element of a query.
    """

    query_heads: int
    head_size: int
    element_bytes: int

    @property
    def flops_per_pair(self) -> int:
        """Operations of one query and one key: a multiplication and an addition an element, for scores and values."""
        return 4 * self.query_heads * self.head_size

    @property
    def query_bytes(self) -> int:
        return self.query_heads * self.head_size * self.element_bytes


@dataclass(frozen=True)
class QueryExchange:
    """How the rows of contiguous slices come together in zigzag slices, and how they return.

    A rank's received rows, sender after sender, are its zigzag pool rows in ascending order: both cuts ascend.

    Attributes:
        plan: the contiguous plan.
    """

    plan: PcpPlan

    @cached_property
    def cut(self) -> PoolCut:
        """The zigzag cut."""
        return cut_pool(self.plan.pool_size, self.plan.world_size, "zigzag")

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Rows that each rank (first index) sends to each rank (second index)."""
        ranks = range(self.plan.world_size)
        return tuple(tuple(sum(e - s for s, e in self._common(src, dst)) for dst in ranks) for src in ranks)

    def sends(self, rank: int) -> list[int]:
        """Rows that ``rank`` sends to each rank; what it receives back when the answers return."""
        return list(self.counts[rank])

    def receives(self, rank: int) -> list[int]:
        """Rows that ``rank`` receives from each rank; what it sends when the answers return."""
        return [row[rank] for row in self.counts]

    def send_rows(self, rank: int) -> torch.Tensor:
        """Positions in ``rank``'s contiguous slice, in the order of their receivers, int64."""
        first, _ = self.plan.slice_bounds(rank)
        receivers = range(self.plan.world_size)
        return concat_ranges([(s - first, e - first) for dst in receivers for s, e in self._common(rank, dst)])

    @property
    def moved_rows(self) -> int:
        """The most rows that leave, or reach, any one rank; those that it keeps do not count."""
        ranks = range(self.plan.world_size)
        kept = [self.counts[rank][rank] for rank in ranks]
        return max(max(sum(self.sends(r)), sum(self.receives(r))) - kept[r] for r in ranks)

    def _common(self, src: int, dst: int) -> list[Piece]:
        """The pool rows that ``src`` holds and ``dst`` attends with, as ranges."""
        first, last = self.plan.slice_bounds(src)
        return [(max(s, first), min(e, last)) for s, e in self.cut.pieces[dst] if max(s, first) < min(e, last)]


def attended_pairs(plan: PcpPlan, cut: PoolCut, context_lens: Sequence[int], rank: int) -> int:
    """Pairs of a pooled query of ``rank`` and a key at or before it.

    Args:
        plan: the step's plan.
        cut: which pool rows each rank answers.
        context_lens: by request, the tokens that earlier steps have computed.
    """
    pairs = 0
    for segment in plan.segments_of(cut, rank):
        before, after = (rows * (rows + 1) // 2 for rows in (segment.start, segment.end))
        pairs += segment.rows * context_lens[segment.request] + after - before
    return pairs


def slowest_pairs(plan: PcpPlan, cut: PoolCut, context_lens: Sequence[int]) -> int:
    """:func:`attended_pairs` of the rank that has the most."""
    return max(attended_pairs(plan, cut, context_lens, rank) for rank in range(plan.world_size))


def seconds_gained(
    plan: PcpPlan, context_lens: Sequence[int], shape: AttentionShape, exchanged: bool, machine: Machine
) -> float:
    """What a zigzag cut gains in one full-attention layer; negative where it loses.

    It saves the slowest rank's surplus of causal attention, and costs two all-to-alls, and what the host issues for
    them, if rows have to be exchanged::

        (pairs_contiguous - pairs_zigzag) * flops_per_pair / attention_flops
            - 2 * link.seconds(moved_rows * query_bytes) - QUERIES * launch
    """
    exchange = QueryExchange(plan)
    saved = slowest_pairs(plan, plan.cut, context_lens) - slowest_pairs(plan, exchange.cut, context_lens)
    gained = saved * shape.flops_per_pair / machine.attention_flops
    if not exchanged:
        return gained
    moving = 2 * machine.link.seconds(exchange.moved_rows * shape.query_bytes)
    return gained - moving - pcp_host.QUERIES * machine.launch


def choose_layout(
    asked: str,
    plan: PcpPlan,
    context_lens: Sequence[int],
    shape: AttentionShape,
    exchanged: bool,
    machine: Machine | None = None,
) -> Layout:
    """How a step cuts the queries of full attention.

    Args:
        asked: ``auto``, or the layout that was asked for.
        plan: the step's contiguous plan.
        context_lens: by request, the tokens that earlier steps have computed.
        shape: the full-attention layers.
        exchanged: whether rows have to be exchanged for a zigzag cut, because recurrent layers need contiguous ones.
        machine: the rates to assume.
    """
    if asked == "contiguous" or asked == "zigzag":
        return asked
    gained = seconds_gained(plan, context_lens, shape, exchanged, machine or Machine())
    return "zigzag" if gained > 0 else "contiguous"
