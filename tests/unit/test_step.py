"""Every rank plans the same step, from what all know alike."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from atom_patches.runtime.step import StepMode, StepPlan, count_tokens, global_mode

BUSY = [mode for mode in StepMode if mode is not StepMode.IDLE]
modes = st.sampled_from(list(StepMode))


@st.composite
def ranks_of_a_step(draw: st.DrawFn) -> list[tuple[StepMode, int]]:
    """Each rank's mode and tokens; at least one rank."""
    drawn = draw(st.lists(modes, min_size=1, max_size=8))
    return [(mode, 0 if mode is StepMode.IDLE else draw(st.integers(1, 50))) for mode in drawn]


def plans(ranks: list[tuple[StepMode, int]], captured: list[int]) -> list[StepPlan]:
    together = global_mode(mode for mode, _ in ranks)
    across = [tokens for _, tokens in ranks]
    return [
        StepPlan.of(m, t, global_mode=together, tokens_across_ranks=across, rank=rank, captured=captured)
        for rank, (m, t) in enumerate(ranks)
    ]


@given(ranks_of_a_step(), st.lists(st.integers(1, 64)))
def test_ranks_agree(ranks: list[tuple[StepMode, int]], captured: list[int]) -> None:
    made = plans(ranks, captured)
    for attribute in ("tokens_across_ranks", "uniform_decode", "graph_size", "global_mode"):
        assert len({getattr(plan, attribute) for plan in made}) == 1, attribute
    assert made[0].tokens_across_ranks == tuple(plan.physical_tokens for plan in made)


@given(ranks_of_a_step(), st.lists(st.integers(1, 64)))
def test_every_rank_runs_rows(ranks: list[tuple[StepMode, int]], captured: list[int]) -> None:
    for plan, (_, tokens) in zip(plans(ranks, captured), ranks, strict=True):
        assert plan.physical_tokens == (tokens or 1)
        assert plan.needs_dummy == (tokens == 0)
        rows = torch.arange(plan.physical_tokens * 2).view(-1, 2)
        assert torch.equal(plan.trim(rows), rows[:tokens])
        assert torch.equal(plan.trim(rows.T, dim=1), rows[:tokens].T)


@given(ranks_of_a_step(), st.lists(st.integers(1, 64)))
def test_decoding_is_uniform_only_if_nobody_does_anything_else(
    ranks: list[tuple[StepMode, int]], captured: list[int]
) -> None:
    busy = [mode for mode, _ in ranks if mode is not StepMode.IDLE]
    for plan in plans(ranks, captured):
        assert plan.uniform_decode == (bool(busy) and all(mode is StepMode.DECODE for mode in busy))


@given(ranks_of_a_step(), st.lists(st.integers(1, 64)))
@example([(StepMode.DECODE, 1), (StepMode.DECODE, 5)], [2, 8])
def test_the_graph_holds_the_largest_rank(ranks: list[tuple[StepMode, int]], captured: list[int]) -> None:
    largest = max(1, *(tokens for _, tokens in ranks))
    for plan in plans(ranks, captured):
        fitting = [size for size in captured if size >= largest]
        expected = min(fitting) if fitting and plan.uniform_decode else None
        assert plan.graph_size == expected


@given(modes, modes)
def test_global_mode_of_two(one: StepMode, other: StepMode) -> None:
    together = global_mode([one, other])
    assert together is global_mode([other, one])
    if one is other or other is StepMode.IDLE:
        assert together is one
    elif one is not StepMode.IDLE:
        assert together is StepMode.MIXED


def test_without_a_global_mode_several_ranks_do_not_decode_uniformly() -> None:
    plan = StepPlan.of(StepMode.DECODE, 2, tokens_across_ranks=[2, 0], captured=[4])
    assert not plan.uniform_decode and plan.graph_size is None
    alone = StepPlan.of(StepMode.DECODE, 2, captured=[4])
    assert alone.uniform_decode and alone.graph_size == 4


def test_rows_that_the_engine_padded_need_no_dummy() -> None:
    plan = StepPlan.of(StepMode.IDLE, 4, global_mode=StepMode.DECODE, tokens_across_ranks=[4, 4], rank=1)
    assert not plan.needs_dummy and plan.physical_tokens == 4


@pytest.mark.parametrize(("mode", "together"), [*product(BUSY, BUSY)])
def test_modes_that_contradict(mode: StepMode, together: StepMode) -> None:
    if together in (mode, StepMode.MIXED):
        StepPlan.of(mode, 1, global_mode=together)
        return
    with pytest.raises(ValueError, match="all ranks together are not"):
        StepPlan.of(mode, 1, global_mode=together)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mode=StepMode.DECODE, tokens=0), "is idle"),
        (dict(mode=StepMode.DECODE, tokens=2, tokens_across_ranks=[1, 2]), "were told 1"),
        (dict(mode=StepMode.DECODE, tokens=2, tokens_across_ranks=[2, -1]), "not negative"),
        (dict(mode=StepMode.DECODE, tokens=2, tokens_across_ranks=[2], rank=1), "rank 1 is none"),
    ],
)
def test_numbers_that_contradict(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepPlan.of(**arguments)


def test_other_rows_are_not_trimmed() -> None:
    with pytest.raises(ValueError, match="1 physical rows, but the tensor to trim has 3"):
        StepPlan.of(StepMode.IDLE, 0).trim(torch.zeros(3, 2))


@given(st.integers(0, 9))
def test_tokens_are_the_last_dimension_of_positions(tokens: int) -> None:
    assert count_tokens(torch.zeros(tokens)) == count_tokens(torch.zeros(3, tokens)) == tokens
