"""L2 normalisation in Triton: several rows a program, read where they lie."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import programs, row_offsets, rows_of, tile

LARGEST_ROW = 16384


def supports_l2norm(x: Tensor, eps: float) -> Verdict:
    if x.shape[-1] > LARGEST_ROW:
        return no(f"a row of {x.shape[-1]} values does not fit into registers; at most {LARGEST_ROW}")
    return YES


def l2norm(x: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    (x,), count, inner, (strides,) = rows_of(x)
    size = x.shape[-1]
    rows, columns, warps = tile(count, size, x.element_size())
    _l2norm[(programs(count, rows),)](
        x, y, count, *strides, eps, SIZE=size, INNER=inner, ROWS=rows, COLUMNS=columns, num_warps=warps
    )
    return y


@jit(do_not_specialize=["count"])
def _l2norm(
    x, y, count, outer_stride, inner_stride, column_stride, eps,
    SIZE: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < SIZE)
    place = row_offsets(row, outer_stride, inner_stride, INNER) + column * column_stride
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) + eps)
    tl.store(y + row.to(tl.int64) * SIZE + column, (values * scale).to(y.dtype.element_ty), mask=inside)
