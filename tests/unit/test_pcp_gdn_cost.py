"""What `auto` expects a GatedDeltaNet layer to cost, and what it chooses."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.link import Link
from atom_patches.runtime.pcp import PcpPlan, plan_step
from atom_patches.runtime.pcp_gdn_cost import (
    AUTOMATIC,
    H200,
    MODES,
    GdnShape,
    Mode,
    Rates,
    admissible,
    choose,
    seconds,
    two_pass_bytes,
)

SHAPE = GdnShape(key_heads=16, value_heads=32, key_size=128, value_size=128)
#: Three layers between those in which all ranks meet.
IN_A_ROW = dataclasses.replace(SHAPE, in_a_row=3)
#: What the devices take, without their links or without the host.
NO_HOST = dataclasses.replace(H200, launch=0.0)
NO_LINK = dataclasses.replace(NO_HOST, link=Link(float("inf"), 0.0))

lengths = st.lists(st.one_of(st.just(1), st.integers(2, 50_000)), min_size=1, max_size=6)


def plan_of(world_size: int, *lens: int) -> PcpPlan:
    plan = plan_step(lens, world_size, min_rows=1)
    assert plan is not None
    return plan


@given(lengths, st.integers(2, 8), st.sampled_from([SHAPE, IN_A_ROW]))
def test_auto_takes_the_cheapest_and_a_faster_link_never_costs_more(
    lens: list[int], ranks: int, shape: GdnShape
) -> None:
    plan = plan_step(lens, ranks, min_rows=1)
    if plan is None:
        return
    faster = dataclasses.replace(H200, link=Link(2 * H200.link.bandwidth))
    for mode in MODES:
        assert 0 < seconds(mode, plan, shape, faster) < seconds(mode, plan, shape)
    chosen = choose(plan, shape)
    assert chosen in AUTOMATIC
    assert seconds(chosen, plan, shape) == min(seconds(mode, plan, shape) for mode in AUTOMATIC)


@pytest.mark.parametrize(
    ("ranks", "lens", "chosen"),
    [
        # What the host issues decides: a relay's ranks between two others issue more.
        (2, (130,), "relay"),
        (8, (520,), "redundant"),
        (2, (65_536,), "two_pass"),
        (4, (65_536,), "two_pass"),
        (8, (262_144,), "two_pass"),
        # Where the cut lies between two prompts, nobody waits and nothing is to be found out: a relay is the same.
        (2, (30_000, 30_000), "two_pass"),
        (4, (8_000, 8_000, 1, 8_000, 8_000), "two_pass"),
    ],
)
def test_what_auto_chooses(ranks: int, lens: tuple[int, ...], chosen: Mode) -> None:
    assert choose(plan_of(ranks, *lens), SHAPE) == chosen


@pytest.mark.parametrize(
    ("ranks", "lens", "chosen"),
    [
        (2, (130,), "redundant"),
        (2, (65_536,), "two_pass"),
        # The second rank waits for half of the first one's rows, or both find out what a tenth of them do.
        (2, (9_000, 11_000), "two_pass"),
    ],
)
def test_what_a_host_in_no_time_would_choose(ranks: int, lens: tuple[int, ...], chosen: Mode) -> None:
    assert choose(plan_of(ranks, *lens), SHAPE, NO_HOST) == chosen


@pytest.mark.parametrize(
    ("ranks", "rates", "chosen"),
    [
        (2, NO_HOST, "relay"),
        (4, NO_HOST, "two_pass"),
        (8, NO_HOST, "two_pass"),
        (4, H200, "relay"),
        (8, H200, "two_pass"),
    ],
)
def test_layers_in_a_row_make_a_relay_cheaper(ranks: int, rates: Rates, chosen: Mode) -> None:
    assert choose(plan_of(ranks, 65_536), IN_A_ROW, rates) == chosen


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_each_launch_costs_alike(mode: Mode, ranks: int) -> None:
    issued = {"redundant": 12, "relay": 10 if ranks == 2 else 13, "two_pass": 21, "head_all_to_all": 29}[mode]
    dear = dataclasses.replace(H200, launch=1.0)
    plan = plan_of(ranks, 10_000)
    assert seconds(mode, plan, SHAPE, dear) == pytest.approx(seconds(mode, plan, SHAPE, NO_HOST) + issued)
    # Without a cut inside a prompt, nothing is handed on and nothing is to be found out.
    apart = plan_of(ranks, *[100] * ranks)
    if mode in ("relay", "two_pass"):
        assert seconds(mode, apart, SHAPE, dear) == pytest.approx(seconds(mode, apart, SHAPE, NO_HOST) + 6)


@given(lengths, st.integers(2, 8), st.integers(1, 8))
def test_a_relay_waits_once_for_all_layers_in_a_row(lens: list[int], ranks: int, layers: int) -> None:
    """Of what a single layer waits for, each of several bears its part; the rows themselves cost as ever."""
    plan = plan_step(lens, ranks, min_rows=1)
    if plan is None:
        return
    rows = max(sum(segment.rows for segment in plan.segments(rank)) for rank in range(ranks))
    scan = rows * H200.fused * SHAPE.size
    waits = seconds("relay", plan, SHAPE, NO_LINK) - scan
    shared = seconds("relay", plan, dataclasses.replace(SHAPE, in_a_row=layers), NO_LINK) - scan
    assert shared == pytest.approx(waits / layers, abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_relayed_prompt_takes_as_long_as_on_one_rank(ranks: int) -> None:
    rows = 65_536
    whole = rows * H200.fused * SHAPE.size
    relayed = seconds("relay", plan_of(ranks, rows), SHAPE, NO_HOST)
    hop = H200.link.seconds(SHAPE.slot_bytes)
    assert whole + (ranks - 1) * hop < relayed < whole + (ranks + 1) * hop
    apart = seconds("relay", plan_of(ranks, *[rows // ranks] * ranks), SHAPE, NO_HOST)
    assert whole / ranks < apart < 1.05 * whole / ranks + 0.3e-3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_passes_exchange_as_much_for_any_length(ranks: int) -> None:
    assert two_pass_bytes(plan_of(ranks, 1_000), SHAPE) == two_pass_bytes(plan_of(ranks, 262_144), SHAPE)
    # One state and one map of 128 by 128 for each of 32 heads, float32.
    assert two_pass_bytes(plan_of(ranks, 1_000), SHAPE)[1] == 32 * 128 * (128 + 128) * 4
    # Nor does it grow with the number of requests, and without a request that is cut there is nothing to tell.
    assert two_pass_bytes(plan_of(ranks, *[37] * 51), SHAPE) == two_pass_bytes(plan_of(ranks, 1_000), SHAPE)
    assert two_pass_bytes(plan_of(ranks, *[40] * ranks), SHAPE) == (0, 0)


def test_the_first_pass_runs_no_more_than_the_rows_that_others_go_on_from() -> None:
    """Of two prompts, the first rank scans the whole of one and the beginning of the other; only that twice."""
    plan = plan_of(2, 9_000, 11_000)
    rates = H200.fused * 10_000 + H200.segment * 1_000
    assert seconds("two_pass", plan, SHAPE, NO_LINK) == pytest.approx(rates * SHAPE.size)


def test_a_scan_of_few_heads_is_not_faster_than_its_longest_request() -> None:
    many = seconds("head_all_to_all", plan_of(8, *[8_192] * 8), SHAPE, NO_HOST)
    one = seconds("head_all_to_all", plan_of(8, 65_536), SHAPE, NO_HOST)
    assert one > 65_536 * H200.depth > many / 2 and one > many


def test_heads_are_dealt_out_evenly_or_not_at_all() -> None:
    assert admissible("head_all_to_all", 8, SHAPE) and not admissible("head_all_to_all", 3, SHAPE)
    assert admissible("two_pass", 3, SHAPE)
