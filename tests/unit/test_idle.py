"""The one row of a rank without requests agrees with itself, and looks like what the engine gives."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.idle import (
    Fallback,
    ModelInputs,
    RequestFields,
    ReservedSlots,
    dummy_fields,
    dummy_inputs,
    one_row,
)
from atom_patches.runtime.step import count_tokens

META = torch.device("meta")
CPU = torch.device("cpu")
integers = st.sampled_from([torch.int32, torch.int64])
devices = st.sampled_from([META, CPU])


@st.composite
def empty_inputs(draw: st.DrawFn) -> tuple[ModelInputs, torch.device]:
    """Inputs without rows on one device, any of them left out."""
    device = draw(devices)
    shapes = st.sampled_from([(0,), (3, 0)])
    positions = draw(st.none() | st.builds(lambda s, t: torch.empty(s, dtype=t, device=device), shapes, integers))
    ids = draw(st.none() | st.builds(lambda t: torch.empty(0, dtype=t, device=device), integers))
    floats = st.sampled_from([torch.float32, torch.bfloat16])
    embeds = draw(st.none() | st.builds(lambda t: torch.empty(0, 16, dtype=t, device=device), floats))
    return ModelInputs(ids, positions, embeds), device


@given(empty_inputs(), devices, st.sampled_from([1, 3]))
def test_inputs(drawn: tuple[ModelInputs, torch.device], elsewhere: torch.device, axes: int) -> None:
    inputs, device = drawn
    made = dummy_inputs(inputs, Fallback(elsewhere, axes))
    given_any = any(getattr(inputs, f.name) is not None for f in fields(inputs))
    assert made.positions is not None and count_tokens(made.positions) == 1
    assert (made.input_ids is not None) or (made.input_embeds is not None)
    for field in fields(inputs):
        old, new = getattr(inputs, field.name), getattr(made, field.name)
        if new is None:
            assert old is None
            continue
        assert new.device == (device if given_any else elsewhere)
        assert new.numel() and (new.is_meta or not new.any())
        if old is None:
            assert new.dtype == torch.int64
        else:
            assert new.dtype == old.dtype and new.dim() == old.dim() and old.numel() == 0
    if inputs.positions is None:
        assert tuple(made.positions.shape) == ((1,) if axes == 1 else (3, 1))


def test_inputs_with_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="entries in dimension -1"):
        dummy_inputs(ModelInputs(positions=torch.zeros(3, 2)), Fallback(CPU))


FIELDS = [f.name for f in fields(RequestFields) if f.name != "query_start_loc"]


@given(st.dictionaries(st.sampled_from(FIELDS), integers), st.integers(0, 9), st.integers(0, 9), st.integers(-1, 9))
def test_fields(said: dict[str, torch.dtype], request: int, cache: int, state: int) -> None:
    given_fields = RequestFields(**{name: torch.empty(0, dtype=dtype) for name, dtype in said.items()})
    made = dummy_fields(given_fields, ReservedSlots(request, cache, state))
    expected = dict(
        request_rows=request, cache_slots=cache, seq_lens=1, extend_lens=1, prefix_lens=0, state_slots=state
    )
    for name in FIELDS:
        field = getattr(made, name)
        if name not in said:
            assert field is None
            continue
        assert field.tolist() == [expected[name]] and field.dtype == said[name]
        assert len(getattr(given_fields, name)) == 0
    assert made.query_start_loc is None


def test_first_rows_of_the_one_request() -> None:
    made = dummy_fields(RequestFields(query_start_loc=torch.zeros(1, dtype=torch.int32)), ReservedSlots(0, 0, -1))
    assert made.query_start_loc is not None
    assert made.query_start_loc.tolist() == [0, 1] and made.query_start_loc.dtype == torch.int32


def test_requests_are_not_overwritten() -> None:
    with pytest.raises(ValueError, match="entries in dimension 0"):
        dummy_fields(RequestFields(seq_lens=torch.ones(2)), ReservedSlots(0, 0, -1))


def test_one_row_keeps_the_other_dimensions() -> None:
    assert one_row(torch.empty(2, 0, 3), 5, dim=1).shape == (2, 1, 3)
