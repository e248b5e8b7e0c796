"""Gated root-mean-square normalisation in Triton: several heads a program, read where they lie."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import programs, row_offsets, rows_of, tile

LARGEST_ROW = 8192


def supports_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Verdict:
    if x.shape[-1] > LARGEST_ROW:
        return no(f"a head of {x.shape[-1]} values does not fit into registers; at most {LARGEST_ROW}")
    return YES


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    (x, gate), count, inner, (x_strides, gate_strides) = rows_of(x, gate)
    size = x.shape[-1]
    rows, columns, warps = tile(count, size, x.element_size())
    _gated_rms_norm[(programs(count, rows),)](
        x, gate, weight, y, count, *x_strides, *gate_strides, weight.stride(0), eps,
        SIZE=size, INNER=inner, SILU=activation == "silu", ROWS=rows, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return y


@jit(do_not_specialize=["count"])
def _gated_rms_norm(
    x, gate, weight, y, count, x_outer, x_inner, x_column, gate_outer, gate_inner, gate_column, weight_stride, eps,
    SIZE: tl.constexpr, INNER: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < SIZE)
    x_place = row_offsets(row, x_outer, x_inner, INNER) + column * x_column
    gate_place = row_offsets(row, gate_outer, gate_inner, INNER) + column * gate_column
    values = tl.load(x + x_place, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + gate_place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column * weight_stride, mask=column < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / SIZE + eps)
    opened = tl.sigmoid(opening)
    if SILU:
        opened *= opening
    result = (values * scale * factor * opened).to(y.dtype.element_ty)
    tl.store(y + row.to(tl.int64) * SIZE + column, result, mask=inside)
