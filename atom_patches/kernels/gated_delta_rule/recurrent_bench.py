"""The recurrent operators at the shape of Qwen3.6-35B-A3B: 16 key and 32 value heads of 128."""

from __future__ import annotations

from typing import Any

import torch

from atom_patches.kernels.benchmark import Case
from atom_patches.kernels.registry import dtype_name

from .recurrent import RECURRENT_GATED_DELTA_RULE, VERIFY_GATED_DELTA_RULE

HK, HV, K, V, DRAFT = 16, 32, 128, 128, 4
FLOPS = HV * V * K * 7


def _rows(device: torch.device, rows: int, slots: int, state_dtype: torch.dtype) -> tuple[Any, ...]:
    """q, k, v, g, beta and a pool of states."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(rows, HK, K), dim=-1).bfloat16() for _ in range(2))
    g, beta = -draw(rows, HV).abs(), draw(rows, HV).sigmoid()
    return q, k, draw(rows, HV, V).bfloat16(), g, beta, draw(slots + 1, HV, V, K).to(state_dtype)


def _places(device: torch.device, slots: int) -> torch.Tensor:
    return (torch.randperm(slots, generator=torch.Generator().manual_seed(0)) + 1).int().to(device)


def _read(rows: int) -> float:
    """Bytes of the rows' inputs and outputs."""
    return rows * (2 * 2 * HK * K + 2 * 2 * HV * V + 2 * 4 * HV)


def _step(rows: int, state_dtype: torch.dtype) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        return *_rows(device, rows, rows, state_dtype), _places(device, rows), K**-0.5, 0

    moved = _read(rows) + 2 * rows * HV * V * K * state_dtype.itemsize
    label = f"{rows} rows, state {dtype_name(state_dtype)}"
    return Case(RECURRENT_GATED_DELTA_RULE, label, inputs, bytes=moved, flops=rows * FLOPS)


def _verify(seqs: int, state_dtype: torch.dtype) -> Case:
    rows = seqs * DRAFT

    def inputs(device: torch.device) -> tuple[Any, ...]:
        q, k, v, g, beta, state = _rows(device, rows, rows, state_dtype)
        cu = torch.arange(0, rows + 1, DRAFT, dtype=torch.int32, device=device)
        accepted = torch.full((seqs,), 2, dtype=torch.int32, device=device)
        return q, k, v, g, beta, cu, state, _places(device, rows).view(seqs, DRAFT), accepted, K**-0.5, 0

    moved = _read(rows) + (seqs + rows) * HV * V * K * state_dtype.itemsize
    label = f"{seqs} drafts of {DRAFT}, state {dtype_name(state_dtype)}"
    return Case(VERIFY_GATED_DELTA_RULE, label, inputs, bytes=moved, flops=rows * FLOPS)


CASES = (
    *(_step(rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 16, 64, 256)),
    *(_verify(seqs, torch.float32) for seqs in (1, 16, 64)),
)
