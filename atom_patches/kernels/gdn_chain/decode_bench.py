"""Benchmark shapes of `gdn_decode` and `gdn_verify`: the GatedDeltaNet layers of Qwen3.6-35B-A3B."""

from __future__ import annotations

from typing import Any

import torch

from atom_patches.kernels.benchmark import Case
from atom_patches.kernels.registry import dtype_name

from .decode import GDN_DECODE, GDN_VERIFY

HK, HV, K, V, TAPS, DRAFT = 16, 32, 128, 128, 4, 4
CHANNELS = 2 * HK * K + HV * V


def _pools(
    device: torch.device, rows: int, places: int, state_dtype: torch.dtype
) -> tuple[tuple[Any, ...], torch.Tensor, tuple[Any, ...]]:
    """The arguments before `slots`, a slot for each row, and the arguments behind."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    before = (
        draw(rows, CHANNELS).bfloat16(), draw(rows, HV).bfloat16(), draw(rows, HV).bfloat16(),
        (draw(CHANNELS, TAPS) * TAPS**-0.5).bfloat16(), None, draw(rows + 1, places, CHANNELS).bfloat16().mT,
        draw(rows + 1, HV, V, K).to(state_dtype),
    )  # fmt: skip
    slots = (torch.randperm(rows, generator=torch.Generator().manual_seed(0)) + 1).int().to(device)
    decay_log = draw(HV).sigmoid().mul(16).log()
    return before, slots, (decay_log, torch.ones(HV, device=device), K**-0.5, 1e-6, "silu", 0)


def _moved(rows: int, reads: int, writes: int, state_dtype: torch.dtype) -> float:
    """Bytes of the rows, the filter, and so many states read and written."""
    state = HV * V * K * state_dtype.itemsize
    return rows * 2 * (CHANNELS + 2 * HV + HV * V) + 2 * CHANNELS * TAPS + (reads + writes) * state


def _flops(rows: int) -> float:
    return rows * (HV * V * K * 7 + CHANNELS * 2 * TAPS)


def _decode(rows: int, state_dtype: torch.dtype) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        before, slots, behind = _pools(device, rows, TAPS - 1, state_dtype)
        return *before, slots, *behind

    moved = _moved(rows, rows, rows, state_dtype) + rows * 2 * 2 * CHANNELS * (TAPS - 1)
    label = f"{rows} rows, state {dtype_name(state_dtype)}"
    return Case(GDN_DECODE, label, inputs, bytes=moved, flops=_flops(rows))


def _verify(seqs: int, state_dtype: torch.dtype) -> Case:
    rows, places = seqs * DRAFT, TAPS - 2 + DRAFT

    def inputs(device: torch.device) -> tuple[Any, ...]:
        before, slots, behind = _pools(device, rows, places, state_dtype)
        cu = torch.arange(0, rows + 1, DRAFT, dtype=torch.int32, device=device)
        accepted = torch.full((seqs,), 2, dtype=torch.int32, device=device)
        return *before, cu, slots.view(seqs, DRAFT), accepted, *behind

    moved = _moved(rows, seqs, rows, state_dtype) + seqs * 2 * CHANNELS * (TAPS - 1 + places)
    label = f"{seqs} drafts of {DRAFT}, state {dtype_name(state_dtype)}"
    return Case(GDN_VERIFY, label, inputs, bytes=moved, flops=_flops(rows))


CASES = (
    *(_decode(rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 4, 16, 64, 256)),
    *(_verify(seqs, torch.float32) for seqs in (1, 16, 64)),
)
