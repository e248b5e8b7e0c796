"""The plan of a prefill-context-parallel step, for generated batches on 2 to 8 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.pcp import PcpPlan, most_rows, plan_step
from atom_patches.runtime.pcp_cuts import Layout

LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")
query_lens = st.lists(st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=12)
world_sizes = st.integers(2, 8)
layouts = st.sampled_from(LAYOUTS)


def plan_of(lens: list[int], world_size: int, layout: Layout = "contiguous") -> PcpPlan | None:
    plan = plan_step(lens, world_size, min_rows=1)
    return plan and replace(plan, layout=layout)


def owned_rows(plan: PcpPlan, rank: int) -> list[int]:
    real = plan.rows_per_rank - plan.padding(rank)
    return plan.local_rows(rank)[len(plan.replicated) : real].tolist()


@given(query_lens, world_sizes, layouts)
def test_every_pooled_row_is_run_exactly_once(lens: list[int], world_size: int, layout: Layout) -> None:
    plan = plan_of(lens, world_size, layout)
    if plan is None:
        return
    run = [row for rank in range(world_size) for row in owned_rows(plan, rank)]
    pooled = [row for row in range(sum(lens)) if row not in set(plan.replicated_rows().tolist())]
    assert (run if layout == "contiguous" else sorted(run)) == pooled


@given(query_lens, world_sizes, layouts)
def test_rows_are_equal_on_all_ranks_and_shrink(lens: list[int], world_size: int, layout: Layout) -> None:
    plan = plan_of(lens, world_size, layout)
    if plan is None:
        return
    sizes = {plan.local_rows(rank).numel() for rank in range(world_size)}
    assert sizes == {plan.rows_per_rank}
    decodes = sum(rows == 1 for rows in lens)
    assert plan.rows_per_rank <= decodes + (sum(lens) - decodes) / world_size + 1
    assert plan.rows_per_rank >= 1
    assert sum(plan.padding(rank) for rank in range(world_size)) < world_size


@given(query_lens, world_sizes)
def test_segments_cover_requests_in_order(lens: list[int], world_size: int) -> None:
    plan = plan_of(lens, world_size)
    if plan is None:
        return
    seen: dict[int, int] = {}
    for rank in range(world_size):
        for segment in plan.segments(rank):
            assert segment.start == seen.get(segment.request, 0)
            seen[segment.request] = segment.end
            rows = range(
                plan.query_start_loc[segment.request] + segment.start,
                plan.query_start_loc[segment.request] + segment.end,
            )
            assert set(rows) <= set(owned_rows(plan, rank))
    assert seen == {i: rows for i, rows in enumerate(lens) if rows > 1}


@given(query_lens, world_sizes)
def test_state_is_handed_over_at_every_cut_inside_a_request(lens: list[int], world_size: int) -> None:
    plan = plan_of(lens, world_size)
    if plan is None:
        return
    for rank in range(world_size - 1):
        assert plan.sends_state(rank) == plan.receives_state(rank + 1)
        if plan.sends_state(rank):
            assert plan.segments(rank)[-1].request == plan.segments(rank + 1)[0].request
    assert not plan.receives_state(0)
    assert not plan.sends_state(world_size - 1)
    finished = [request for rank in range(world_size) for request in plan.finished(rank)]
    assert finished == list(plan.pooled)


@given(query_lens, world_sizes, layouts)
def test_gathered_slices_are_restored_to_global_order(lens: list[int], world_size: int, layout: Layout) -> None:
    plan = plan_of(lens, world_size, layout)
    if plan is None:
        return
    slices = torch.cat([plan.local_rows(rank)[len(plan.replicated) :] for rank in range(world_size)])
    whole = slices[plan.gathered_rows()]
    replicated = plan.replicated_rows()
    whole[replicated] = plan.local_rows(0)[: len(plan.replicated)]
    assert whole.tolist() == list(range(sum(lens)))


@given(query_lens, world_sizes, layouts, st.data())
def test_an_exchange_brings_each_wanted_row_to_all_ranks(
    lens: list[int], world_size: int, layout: Layout, data: st.DataObject
) -> None:
    plan = plan_of(lens, world_size, layout)
    if plan is None:
        return
    wanted = data.draw(st.lists(st.sampled_from(range(sum(lens))), unique=True, max_size=20))
    exchange = plan.exchange(wanted)
    assert len({len(rows) for rows in exchange.send_rows}) == 1
    hidden = [plan.local_rows(rank) for rank in range(world_size)]
    gathered = torch.cat([hidden[rank][list(exchange.send_rows[rank])] for rank in range(world_size)])
    for rank in range(world_size):
        learned = torch.full((sum(lens),), -1)
        learned[exchange.global_rows] = gathered[exchange.gathered_rows]
        learned[exchange.replicated_global] = hidden[rank][exchange.replicated_local]
        assert [row for row in learned.tolist() if row >= 0] == sorted(wanted)
        assert all(learned[row] == row for row in wanted)


@given(query_lens, world_sizes, st.integers(1, 64))
def test_no_step_needs_more_rows_than_announced(lens: list[int], world_size: int, min_rows: int) -> None:
    plan = plan_step(lens, world_size, min_rows)
    rows = sum(lens) if plan is None else plan.rows_per_rank
    assert rows <= most_rows(sum(lens), len(lens), world_size, min_rows)


@pytest.mark.parametrize(
    ("lens", "world_size", "min_rows"),
    [([1, 1, 1], 2, 1), ([1], 4, 1), ([5], 1, 1), ([100], 2, 64), ([3], 4, 1)],
)
def test_a_step_without_enough_pooled_rows_is_replicated(lens: list[int], world_size: int, min_rows: int) -> None:
    assert plan_step(lens, world_size, min_rows) is None


def test_the_smallest_split_leaves_trailing_ranks_empty_but_padded() -> None:
    plan = plan_step([5], 4, 1)
    assert plan is not None
    assert [plan.slice_bounds(rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert plan.segments(3) == ()
    assert plan.local_rows(3).tolist() == [0, 0]
