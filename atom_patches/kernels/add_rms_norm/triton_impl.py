"""Residual addition and root-mean-square normalisation in Triton: rows in registers, read once."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import programs, row_offsets, rows_of, tile

LARGEST_ROW = 16384


def supports_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    if x.shape[-1] > LARGEST_ROW:
        return no(f"a row of {x.shape[-1]} values does not fit into registers; at most {LARGEST_ROW}")
    return YES


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(y)
    if y.numel() == 0:
        return y, total
    (x, residual), count, inner, (x_strides, residual_strides) = rows_of(x, residual)
    size = x.shape[-1]
    rows, columns, warps = tile(count, size, x.element_size())
    _add_rms_norm[(programs(count, rows),)](
        x, residual, weight, y, total, count, *x_strides, *residual_strides, weight.stride(0), eps,
        SIZE=size, INNER=inner, GEMMA=gemma, ROWS=rows, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return y, total


@jit(do_not_specialize=["count"])
def _add_rms_norm(
    x, residual, weight, y, total, count,
    x_outer, x_inner, x_column, residual_outer, residual_inner, residual_column, weight_stride, eps,
    SIZE: tl.constexpr, INNER: tl.constexpr, GEMMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < SIZE)
    x_place = row_offsets(row, x_outer, x_inner, INNER) + column * x_column
    residual_place = row_offsets(row, residual_outer, residual_inner, INNER) + column * residual_column
    added = tl.load(x + x_place, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(residual + residual_place, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    factor = tl.load(weight + column * weight_stride, mask=column < SIZE, other=0.0).to(tl.float32)
    if GEMMA:
        factor += 1.0
    place = row.to(tl.int64) * SIZE + column
    tl.store(total + place, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / SIZE + eps)
    tl.store(y + place, (values * scale * factor).to(y.dtype.element_ty), mask=inside)
