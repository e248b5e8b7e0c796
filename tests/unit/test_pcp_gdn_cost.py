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
    admissible,
    choose,
    seconds,
    two_pass_bytes,
)

SHAPE = GdnShape(key_heads=16, value_heads=32, key_size=128, value_size=128)

lengths = st.lists(st.one_of(st.just(1), st.integers(2, 50_000)), min_size=1, max_size=6)


def plan_of(world_size: int, *lens: int) -> PcpPlan:
    plan = plan_step(lens, world_size, min_rows=1)
    assert plan is not None
    return plan


@given(lengths, st.integers(2, 8))
def test_auto_takes_the_cheapest_and_a_faster_link_never_costs_more(lens: list[int], ranks: int) -> None:
    plan = plan_step(lens, ranks, min_rows=1)
    if plan is None:
        return
    faster = dataclasses.replace(H200, link=Link(2 * H200.link.bandwidth))
    for mode in MODES:
        assert 0 < seconds(mode, plan, SHAPE, faster) < seconds(mode, plan, SHAPE)
    chosen = choose(plan, SHAPE)
    assert chosen in AUTOMATIC
    assert seconds(chosen, plan, SHAPE) == min(seconds(mode, plan, SHAPE) for mode in AUTOMATIC)


@pytest.mark.parametrize(
    ("ranks", "lens", "chosen"),
    [
        (2, (130,), "redundant"),
        (8, (520,), "redundant"),
        (2, (65_536,), "two_pass"),
        (4, (65_536,), "two_pass"),
        (8, (262_144,), "two_pass"),
        # Nobody waits where the cut lies between two prompts, and nothing is to be found out first.
        (2, (30_000, 30_000), "relay"),
        (4, (8_000, 8_000, 1, 8_000, 8_000), "relay"),
    ],
)
def test_what_auto_chooses(ranks: int, lens: tuple[int, ...], chosen: Mode) -> None:
    assert choose(plan_of(ranks, *lens), SHAPE) == chosen


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_relayed_prompt_takes_as_long_as_on_one_rank(ranks: int) -> None:
    rows = 65_536
    whole = rows * H200.core * SHAPE.size
    relayed = seconds("relay", plan_of(ranks, rows), SHAPE)
    assert whole < relayed < 1.05 * whole
    apart = seconds("relay", plan_of(ranks, *[rows // ranks] * ranks), SHAPE)
    assert whole / ranks < apart < 1.05 * whole / ranks + 0.3e-3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_passes_exchange_as_much_for_any_length(ranks: int) -> None:
    assert two_pass_bytes(plan_of(ranks, 1_000), SHAPE) == two_pass_bytes(plan_of(ranks, 262_144), SHAPE)
    # One state and one map of 128 by 128 for each of 32 heads, float32.
    assert two_pass_bytes(plan_of(ranks, 1_000), SHAPE)[1] == 32 * 128 * (128 + 128) * 4


def test_a_scan_of_few_heads_is_not_faster_than_its_longest_request() -> None:
    many = seconds("head_all_to_all", plan_of(8, *[8_192] * 8), SHAPE)
    one = seconds("head_all_to_all", plan_of(8, 65_536), SHAPE)
    assert one > 65_536 * H200.depth > many / 2 and one > many


def test_heads_are_dealt_out_evenly_or_not_at_all() -> None:
    assert admissible("head_all_to_all", 8, SHAPE) and not admissible("head_all_to_all", 3, SHAPE)
    assert admissible("two_pass", 3, SHAPE)
