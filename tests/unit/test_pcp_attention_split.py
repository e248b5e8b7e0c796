"""Balanced full attention: who answers which query, how queries move, and when it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from atom_patches.runtime import pcp_host
from atom_patches.runtime.link import Link
from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.runtime.pcp_attention_split import (
    AttentionShape,
    Machine,
    QueryExchange,
    attended_pairs,
    choose_layout,
    seconds_gained,
    slowest_pairs,
)
from atom_patches.runtime.pcp_cuts import PoolCut, cut_pool

query_lens = st.lists(st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=12)
world_sizes = st.integers(2, 8)
#: 16 query heads of 256, bfloat16.
SHAPE = AttentionShape(query_heads=16, head_size=256, element_bytes=2)


@st.composite
def plans(draw: st.DrawFn) -> PcpPlan:
    plan = plan_step(draw(query_lens), draw(world_sizes), min_rows=1)
    assume(plan is not None)
    assert plan is not None
    return plan


@st.composite
def steps(draw: st.DrawFn) -> tuple[PcpPlan, list[int]]:
    """A plan and each request's context."""
    plan = draw(plans())
    size = len(plan.query_lens)
    return plan, draw(st.lists(st.integers(0, 400), min_size=size, max_size=size))


def rows_of(cut: PoolCut, rank: int) -> list[int]:
    return cut.pool_rows(rank).tolist()


@given(st.integers(1, 2000), world_sizes, st.sampled_from(["contiguous", "zigzag"]))
def test_a_cut_has_each_row_once_in_ascending_pieces(size: int, world_size: int, layout: str) -> None:
    assume(size >= world_size)
    cut = cut_pool(size, world_size, layout)  # type: ignore[arg-type]
    assert sorted(row for rank in range(world_size) for row in rows_of(cut, rank)) == list(range(size))
    for rank, pieces in enumerate(cut.pieces):
        assert rows_of(cut, rank) == sorted(rows_of(cut, rank))
        assert all(start < end for start, end in pieces)
        assert all(before[1] < after[0] for before, after in zip(pieces, pieces[1:], strict=False))
        assert cut.rows(rank) == len(rows_of(cut, rank)) <= cut.slice_size == -(-size // world_size)
        assert [cut.place(row) for row in rows_of(cut, rank)] == [(rank, i) for i in range(cut.rows(rank))]
    gathered = cut.gathered_rows().tolist()
    assert [divmod(place, cut.slice_size) for place in gathered] == [cut.place(row) for row in range(size)]


@given(st.integers(1, 2000), world_sizes)
def test_no_rank_is_without_queries(size: int, world_size: int) -> None:
    """Attention is never called with nothing to answer: where each rank gets a row, no chunk in front is empty."""
    assume(size >= world_size)
    cut = cut_pool(size, world_size, "zigzag")
    assert all(cut.rows(rank) > 0 for rank in range(world_size))


def test_a_small_zigzag() -> None:
    assert cut_pool(16, 4, "zigzag").pieces == (((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 10),))
    # An odd slice is longer in front; what is missing at the end is the first rank's padding.
    assert cut_pool(11, 4, "zigzag").pieces == (((0, 2),), ((2, 4), (10, 11)), ((4, 6), (9, 10)), ((6, 9),))


@given(plans())
def test_zigzag_segments_are_the_pieces_request_by_request(plan: PcpPlan) -> None:
    plan = replace(plan, layout="zigzag")
    for rank in range(plan.world_size):
        rows = [
            plan.query_start_loc[segment.request] + row
            for segment in plan.segments(rank)
            for row in range(segment.start, segment.end)
        ]
        assert rows == plan.pool_rows()[plan.cut.pool_rows(rank)].tolist()


def all_to_all(sent: list[torch.Tensor], splits: list[list[int]]) -> list[torch.Tensor]:
    """What each rank receives when each sends its rows in parts of the given lengths."""
    parts = [rows.split(lengths) for rows, lengths in zip(sent, splits, strict=True)]
    return [torch.cat([parts[src][dst] for src in range(len(sent))]) for dst in range(len(sent))]


@given(plans())
def test_moved_queries_arrive_in_zigzag_order_and_return_to_their_places(plan: PcpPlan) -> None:
    exchange = QueryExchange(plan)
    ranks = range(plan.world_size)
    held = [torch.arange(*plan.slice_bounds(rank)) for rank in ranks]
    sent = [held[rank][exchange.send_rows(rank)] for rank in ranks]
    collected = all_to_all(sent, [exchange.sends(rank) for rank in ranks])
    for rank in ranks:
        assert collected[rank].tolist() == rows_of(exchange.cut, rank)
        assert [len(rows) for rows in collected[rank].split(exchange.receives(rank))] == exchange.receives(rank)
    returned = all_to_all(collected, [exchange.receives(rank) for rank in ranks])
    for rank in ranks:
        restored = torch.full_like(held[rank], -1)
        restored[exchange.send_rows(rank)] = returned[rank]
        assert restored.equal(held[rank])
    assert exchange.moved_rows <= plan.slice_size


@given(steps())
def test_pairs_are_those_of_a_count(step: tuple[PcpPlan, list[int]]) -> None:
    plan, contexts = step
    every = [(i, row) for i in plan.pooled for row in range(plan.query_lens[i])]
    for cut in (plan.cut, QueryExchange(plan).cut):
        for rank in range(plan.world_size):
            counted = sum(contexts[every[r][0]] + every[r][1] + 1 for r in rows_of(cut, rank))
            assert attended_pairs(plan, cut, contexts, rank) == counted


@given(st.integers(64, 300_000), world_sizes, st.integers(0, 100_000))
def test_a_long_prompt_is_balanced(rows: int, world_size: int, context: int) -> None:
    """The slowest rank has its share, and at most what a row more in each of its two chunks adds."""
    plan = plan_step([rows], world_size, min_rows=8)
    assume(plan is not None)
    assert plan is not None
    total = rows * context + rows * (rows + 1) // 2
    slowest = slowest_pairs(plan, QueryExchange(plan).cut, [context])
    assert slowest <= total / world_size + 2 * (rows + context)
    if context == 0 and rows > 1000:
        assert slowest_pairs(plan, plan.cut, [0]) > 1.4 * slowest


@given(steps(), st.sampled_from([SHAPE, AttentionShape(1, 64, 4)]), st.booleans())
def test_auto_takes_what_costs_less(step: tuple[PcpPlan, list[int]], shape: AttentionShape, exchanged: bool) -> None:
    plan, contexts = step
    machine = Machine(attention_flops=1e9, link=Link(1e9, 1e-5), launch=1e-6)
    exchange = QueryExchange(plan)

    def seconds(cut: PoolCut) -> float:
        return slowest_pairs(plan, cut, contexts) * shape.flops_per_pair / 1e9

    moving = 2 * (1e-5 + exchange.moved_rows * shape.query_bytes / 1e9) + pcp_host.QUERIES * 1e-6 if exchanged else 0.0
    gained = seconds(plan.cut) - seconds(exchange.cut) - moving
    assert seconds_gained(plan, contexts, shape, exchanged, machine) == pytest.approx(gained)
    chosen = choose_layout("auto", plan, contexts, shape, exchanged, machine)
    if abs(gained) > 1e-9:
        assert chosen == ("zigzag" if gained > 0 else "contiguous")
    assert choose_layout("contiguous", plan, contexts, shape, exchanged, machine) == "contiguous"
    assert choose_layout("zigzag", plan, contexts, shape, exchanged, machine) == "zigzag"


@pytest.mark.parametrize(
    ("rows", "context", "world_size", "exchanged", "chosen"),
    [
        (65_536, 0, 2, True, "zigzag"),
        (65_536, 0, 8, True, "zigzag"),
        (32_768, 0, 2, True, "zigzag"),
        (16_384, 0, 2, True, "zigzag"),
        # Short prompts: sending costs more than it saves, and a model that need not send gains at any length.
        (4_096, 0, 2, True, "contiguous"),
        (1_024, 0, 2, True, "contiguous"),
        (1_024, 0, 2, False, "zigzag"),
        # A chunk far down a prompt: nearly all keys lie before the chunk, so contiguous slices are balanced.
        (2_048, 200_000, 4, True, "contiguous"),
        (2_048, 200_000, 4, False, "zigzag"),
    ],
)
def test_choices_of_the_default_machine(rows: int, context: int, world_size: int, exchanged: bool, chosen: str) -> None:
    plan = plan_step([rows], world_size, min_rows=64)
    assert plan is not None
    assert choose_layout("auto", plan, [context], SHAPE, exchanged) == chosen


def test_two_equal_prompts_on_two_ranks_stay_contiguous() -> None:
    """Each rank has one prompt; a zigzag is as balanced, and gains nothing."""
    plan = plan_step([5000, 5000], 2, min_rows=64)
    assert plan is not None
    for exchanged in (True, False):
        assert choose_layout("auto", plan, [0, 0], SHAPE, exchanged) == "contiguous"
