"""Recurrent metadata: how sequences stand in a step, and how they are bound to it."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.context import STEP, bind_gdn, current_gdn, step
from atom_patches.runtime.gdn import GdnBinding, LayerStates
from atom_patches.runtime.step import StepMode, StepPlan

CPU = torch.device("cpu")
STATES = LayerStates(torch.zeros(2, 4, 3), torch.zeros(2, 1, 2, 2))


def binding(decodes: int = 0, verifies: int = 0, prefills: tuple[int, ...] = (), drafted: int = 2) -> GdnBinding:
    lengths = [1] * decodes + [drafted] * verifies + list(prefills)
    return GdnBinding(
        query_start_loc=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        slots=torch.arange(len(lengths), dtype=torch.int32),
        has_initial_state=torch.ones(len(lengths), dtype=torch.bool),
        layers={3: STATES},
        decodes=decodes,
        verifies=verifies,
        prefills=len(prefills),
        draft_tokens=drafted if verifies else 0,
        draft_rows=torch.arange(verifies),
    )


@given(st.integers(0, 4), st.integers(0, 4), st.lists(st.integers(0, 9), max_size=4), st.integers(1, 4))
def test_prefills_begin_behind_the_others(decodes: int, verifies: int, prefills: list[int], drafted: int) -> None:
    made = binding(decodes, verifies, tuple(prefills), drafted)
    assert made.sequences == decodes + verifies + len(prefills)
    assert made.first_prefill == decodes + verifies
    assert made.rows_before_prefills == int(made.query_start_loc[made.first_prefill])
    assert made.prefill_start_loc.tolist() == [0, *accumulate(prefills)]


def test_idle_has_no_sequence() -> None:
    made = GdnBinding.idle({3: STATES}, CPU)
    assert made.sequences == made.rows_before_prefills == 0 and made.prefill_start_loc.tolist() == [0]


def test_states_of_a_layer() -> None:
    assert binding(1).states(3) is STATES
    with pytest.raises(LookupError, match=r"layer 2 has no recurrent states; \[3\] have"):
        binding(1).states(2)


@pytest.mark.parametrize("name", ["query_start_loc", "slots", "has_initial_state"])
def test_shapes_that_contradict(name: str) -> None:
    right = {n: getattr(binding(2), n) for n in ("query_start_loc", "slots", "has_initial_state")}
    with pytest.raises(ValueError, match=f"{name} must be"):
        GdnBinding(**(right | {name: right[name][1:]}), layers={}, decodes=2)


def test_drafts_need_their_number() -> None:
    with pytest.raises(ValueError, match="need draft_tokens"):
        binding(verifies=1, drafted=0)


def test_binding_replaces_one_field_and_restores() -> None:
    plan = StepPlan.of(StepMode.DECODE, 1)
    outer, inner = binding(1), binding(0, 0, (3,))
    with step(plan) as before:
        with bind_gdn(outer) as bound:
            assert bound.plan is plan and current_gdn() is outer
            with pytest.raises(KeyError), bind_gdn(inner) as nested:
                assert nested.plan is plan and current_gdn() is inner
                raise KeyError
            assert STEP.current() is bound
        assert STEP.current() is before and before.gdn is None
    assert STEP.current() is None


def test_binding_stands_alone() -> None:
    with bind_gdn(binding(1)) as bound:
        assert bound.plan is None
    assert STEP.current() is None
    with pytest.raises(LookupError, match="no recurrent metadata are bound"):
        current_gdn()


def test_an_inner_step_does_not_see_outer_metadata() -> None:
    """A draft model's step within a target model's has states of its own."""
    with step(StepPlan.of(StepMode.DECODE, 1)), bind_gdn(binding(1)):
        with step(StepPlan.of(StepMode.IDLE, 0)), pytest.raises(LookupError):
            current_gdn()
        assert current_gdn().decodes == 1


def test_binding_reads_nothing_from_the_device() -> None:
    meta = torch.device("meta")
    made = GdnBinding(
        torch.zeros(4, dtype=torch.int32, device=meta),
        torch.zeros(3, dtype=torch.int32, device=meta),
        torch.zeros(3, dtype=torch.bool, device=meta),
        layers={},
        decodes=2,
        prefills=1,
    )
    assert made.prefill_start_loc.shape == (2,) and made.rows_before_prefills == 2
