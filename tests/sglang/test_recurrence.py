"""Snapshots of recurrent states for SGLang's prefix cache, taken in the middle of a prefill, change nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.host_waits import GPU, host_waits

CHUNK = 4
HEADS, SIZE, TAPS = 2, 8, 4
CHANNELS = 3 * HEADS * SIZE
SLOTS = 16

#: Of each sequence: its rows, chunks behind which a snapshot is taken (0: none), and whether it goes on from a state.
Sequences = list[tuple[int, int, bool]]
#: A sequence of no request: SGLang pads batches with them, behind the others.
PADDING = (2, 0, False)


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


def bound(plan: Sequences, layer: LayerStates) -> GdnBinding:
    starts = torch.tensor([0, *(rows for rows, _, _ in plan)]).cumsum(0).to(torch.int32)
    slots = torch.tensor([*range(1, len(plan)), -1], dtype=torch.int32)
    return GdnBinding(starts, slots, torch.tensor([on for _, _, on in plan]), {0: layer}, prefills=len(plan))


def batch(plan: Sequences) -> Any:
    prefix = torch.full((len(plan),), CHUNK, dtype=torch.int64)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False, is_target_verify=lambda: False)
    return SimpleNamespace(
        forward_mode=mode,
        extend_prefix_lens=prefix,
        mamba_track_mask=torch.tensor([chunks > 0 for _, chunks, _ in plan]),
        mamba_track_indices=torch.tensor(kept(plan)),
        # The rows wanted need not end a chunk: the snapshot is that of the last whole one.
        mamba_track_seqlens=prefix + torch.tensor([min(rows, chunks * CHUNK + 1) for rows, chunks, _ in plan]),
    )


def kept(plan: Sequences) -> list[int]:
    """Slots for snapshots, from the pool's last one on down."""
    return list(range(SLOTS - 1, SLOTS - 1 - len(plan), -1))


@contextmanager
def stepping(step: Any, binding: GdnBinding) -> Iterator[None]:
    backend = SimpleNamespace(forward_metadata=SimpleNamespace(has_mamba_track_mask=True))
    with pytest.MonkeyPatch.context() as patch, BATCH.entered(step), context.bind_gdn(binding):
        patch.setattr(recurrence, "linear_backend", lambda: backend)
        patch.setattr(recurrence, "get_server_args", lambda: None)
        patch.setattr(recurrence, "mamba_cache_chunk_size", lambda config: CHUNK)
        yield


@settings(max_examples=60, deadline=None)
@given(plan=sequences(), seed=st.integers(0, 99))
def test_outputs_and_states_are_those_without_snapshots(plan: Sequences, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    padded = [*plan, PADDING]
    total = sum(rows for rows, _, _ in padded) + 2  # SGLang may pad rows, too
    mixed = torch.randn(total, CHANNELS, generator=generator)
    a, b = (torch.randn(total, HEADS, generator=generator) for _ in range(2))
    whole, cut, part = states(seed), states(seed), states(seed)
    with context.bind_gdn(bound(padded, whole)):
        expected = run(mixed, a, b)
    with stepping(batch(padded), bound(padded, cut)):
        found = recurrence.Recurrence(0, run)(mixed, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    start = 0
    for i, (rows, chunks, on) in enumerate(plan):
        if chunks:
            first = slice(start, start + chunks * CHUNK)
            one = GdnBinding(
                torch.tensor([0, chunks * CHUNK]), torch.tensor([1 + i]), torch.tensor([on]), {0: part}, prefills=1
            )
            with context.bind_gdn(one):
                run(mixed[first], a[first], b[first])
            # Where no snapshot is taken, no slot changes but the live ones.
            whole.conv[kept(padded)[i]] = part.conv[1 + i]
            whole.temporal[kept(padded)[i]] = part.temporal[1 + i]
        start += rows
    torch.testing.assert_close(cut.conv, whole.conv)
    torch.testing.assert_close(cut.temporal, whole.temporal, rtol=1e-4, atol=1e-5)


def test_the_host_waits_for_nothing() -> None:
    """Else it would in every recurrent layer of every prefill."""
    plan: Sequences = [(9, 2, True), (3, 0, False), PADDING]
    with host_waits() as waits:
        on_gpu = {k: v.to(GPU) if isinstance(v, Tensor) else v for k, v in vars(batch(plan)).items()}
        pools = LayerStates(torch.empty(SLOTS, CHANNELS, TAPS, device=GPU), torch.empty(SLOTS, HEADS, 8, device=GPU))
        made = bound(plan, pools)
        binding = dataclasses.replace(
            made,
            query_start_loc=made.query_start_loc.to(GPU),
            slots=made.slots.to(GPU),
            has_initial_state=made.has_initial_state.to(GPU),
        )
        waits.clear()  # what stands above
        with stepping(SimpleNamespace(**on_gpu), binding):
            recurrence.Recurrence(0, lambda *rows: torch.zeros(3, device=GPU))(*(torch.zeros(3, device=GPU),) * 3)
    assert not waits
