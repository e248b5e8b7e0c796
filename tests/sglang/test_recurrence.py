"""Snapshots of recurrent states for SGLang's prefix cache, taken in the middle of a prefill, change nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("sglang")

from atom_patches.kernels.gdn_chain import gdn_prefill
from atom_patches.runtime import context
from atom_patches.runtime.gdn import GdnBinding, LayerStates
from atom_patches.sglang.adapters import recurrence
from atom_patches.sglang.adapters.current import BATCH

CHUNK = 4
HEADS, SIZE, TAPS = 2, 8, 4
CHANNELS = 3 * HEADS * SIZE
SLOTS = 16

#: Of each sequence: its rows, chunks behind which a snapshot is taken (0: none), and whether it goes on from a state.
Sequences = list[tuple[int, int, bool]]


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    lengths = draw(st.lists(st.integers(1, 11), min_size=1, max_size=4))
    return [(rows, draw(st.integers(0, rows // CHUNK)), draw(st.booleans())) for rows in lengths]


def states(seed: int) -> LayerStates:
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(SLOTS, CHANNELS, TAPS - 1, generator=generator)
    return LayerStates(conv, torch.randn(SLOTS, HEADS, SIZE, SIZE, generator=generator))


def run(mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A layer's recurrence over whatever is bound."""
    binding, generator = context.current_gdn(), torch.Generator().manual_seed(5)
    bound = binding.states(0)
    return gdn_prefill(
        mixed, a, b, conv_weight=torch.randn(CHANNELS, TAPS, generator=generator), conv_bias=None,
        conv_state=bound.conv, ssm_state=bound.temporal, slots=binding.slots,
        has_initial_state=binding.has_initial_state, cu_seqlens=binding.query_start_loc,
        A_log=torch.zeros(HEADS), dt_bias=torch.ones(HEADS), null_slot=None,
    )  # fmt: skip


def bound(rows: list[int], going_on: list[bool], layer: LayerStates) -> GdnBinding:
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    slots = torch.arange(1, 1 + len(rows), dtype=torch.int32)
    return GdnBinding(starts, slots, torch.tensor(going_on), {0: layer}, prefills=len(rows))


def batch(plan: Sequences) -> Any:
    prefix = torch.full((len(plan),), CHUNK, dtype=torch.int64)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False, is_target_verify=lambda: False)
    return SimpleNamespace(
        forward_mode=mode,
        extend_prefix_lens=prefix,
        mamba_track_mask=torch.tensor([chunks > 0 for _, chunks, _ in plan]),
        mamba_track_indices=torch.arange(10, 10 + len(plan)),
        # The rows wanted need not end a chunk: the snapshot is that of the last whole one.
        mamba_track_seqlens=prefix + torch.tensor([min(rows, chunks * CHUNK + 1) for rows, chunks, _ in plan]),
    )


@settings(max_examples=60, deadline=None)
@given(plan=sequences(), seed=st.integers(0, 99))
def test_outputs_and_states_are_those_without_snapshots(plan: Sequences, seed: int) -> None:
    rows, going_on = [n for n, _, _ in plan], [on for _, _, on in plan]
    generator = torch.Generator().manual_seed(seed)
    total = sum(rows) + 2  # SGLang may pad a batch
    mixed = torch.randn(total, CHANNELS, generator=generator)
    a, b = (torch.randn(total, HEADS, generator=generator) for _ in range(2))
    whole, cut, part = states(seed), states(seed), states(seed)
    with context.bind_gdn(bound(rows, going_on, whole)):
        expected = run(mixed, a, b)
    backend = SimpleNamespace(forward_metadata=SimpleNamespace(has_mamba_track_mask=any(c for _, c, _ in plan)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "linear_backend", lambda: backend)
        patch.setattr(recurrence, "get_server_args", lambda: SimpleNamespace(mamba_cache_chunk_size=CHUNK))
        with BATCH.entered(batch(plan)), context.bind_gdn(bound(rows, going_on, cut)):
            found = recurrence.Recurrence(0, run)(mixed, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    live = slice(1, 1 + len(plan))
    torch.testing.assert_close(cut.conv[live], whole.conv[live])
    torch.testing.assert_close(cut.temporal[live], whole.temporal[live], rtol=1e-4, atol=1e-5)
    start = 0
    for i, (n, chunks, on) in enumerate(plan):
        if chunks:
            first = slice(start, start + chunks * CHUNK)
            one = GdnBinding(
                torch.tensor([0, chunks * CHUNK]), torch.tensor([1 + i]), torch.tensor([on]), {0: part}, prefills=1
            )
            with context.bind_gdn(one):
                run(mixed[first], a[first], b[first])
            torch.testing.assert_close(cut.conv[10 + i], part.conv[1 + i])
            torch.testing.assert_close(cut.temporal[10 + i], part.temporal[1 + i], rtol=1e-4, atol=1e-5)
        start += n
