"""Rows by plan in Triton: one launch for all tensors, a program a block of rows and columns."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no

from . import row_size

MOST_TENSORS = 8
BLOCK = 4096
"""Elements that a program copies."""


def supports_gather_rows(xs: list[Tensor], more: list[Tensor], index: Tensor, padded: bool) -> Verdict:
    return _supports(xs)


def supports_pack_rows(xs: list[Tensor], index: Tensor, padded: bool) -> Verdict:
    return _supports(xs)


def supports_scatter_rows(xs: list[Tensor], index: Tensor, num_rows: int, padded: bool) -> Verdict:
    return _supports(xs)


def _supports(xs: list[Tensor]) -> Verdict:
    if len(xs) > MOST_TENSORS:
        return no(f"{len(xs)} tensors in one launch; at most {MOST_TENSORS}")
    if any(x.dtype.is_complex for x in xs):
        return no("complex numbers")
    return YES


def gather_rows(xs: list[Tensor], more: list[Tensor], index: Tensor, padded: bool) -> list[Tensor]:
    outs = [x.new_empty(index.shape[0], *x.shape[1:]) for x in xs]
    _move(outs, xs, more, index, scatter=False)
    return outs


def pack_rows(xs: list[Tensor], index: Tensor, padded: bool) -> Tensor:
    widths = [row_size(x) for x in xs]
    packed = xs[0].new_empty(index.shape[0], sum(widths))
    _move(list(packed.split(widths, dim=1)), xs, [], index, scatter=False)
    return packed


def scatter_rows(xs: list[Tensor], index: Tensor, num_rows: int, padded: bool) -> list[Tensor]:
    outs = [x.new_zeros(num_rows, *x.shape[1:]) for x in xs]
    _move(outs, xs, [], index, scatter=True)
    return outs


def _move(outs: list[Tensor], xs: list[Tensor], more: list[Tensor], index: Tensor, *, scatter: bool) -> None:
    rows = index.shape[0]
    flat = [(_flat(out), _flat(x), _flat(y)) for out, x, y in zip(outs, xs, more or xs, strict=True) if out.numel()]
    if not rows or not flat:
        return
    to, first, second = zip(*flat, strict=True)
    widths = tuple(x.shape[1] for x in first)
    block_c = min(1024, triton.next_power_of_2(max(widths)))
    block_r = BLOCK // block_c
    blocks = sum(triton.cdiv(width, block_c) for width in widths)
    _move_rows[(triton.cdiv(rows, block_r), blocks)](
        to, first, second, index, rows, first[0].shape[0], index.stride(0),
        tuple(x.stride(0) for x in to), tuple(x.stride(0) for x in first), tuple(x.stride(0) for x in second),
        tuple(x.stride(1) for x in first), tuple(x.stride(1) for x in second),
        WIDTHS=widths, BLOCK_R=block_r, BLOCK_C=block_c, TENSORS=len(widths), MORE=bool(more), SCATTER=scatter,
    )  # fmt: skip


def _flat(x: Tensor) -> Tensor:
    """x as [rows, columns] of a type that can be copied; a copy only if its inner dimensions do not lie in line."""
    x = x[:, None] if x.dim() == 1 else x.flatten(1)
    return x.view(torch.uint8) if x.element_size() == 1 else x


@jit(do_not_specialize=["rows", "num_first"])
def _move_rows(
    outs, xs, more, index, rows, num_first, index_stride, out_rows, x_rows, more_rows, x_columns, more_columns,
    WIDTHS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TENSORS: tl.constexpr, MORE: tl.constexpr,
    SCATTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    named = tl.load(index + row * index_stride, mask=row < rows, other=-1).to(tl.int64)
    block = tl.program_id(1)
    for i in tl.static_range(TENSORS):
        blocks = (WIDTHS[i] + BLOCK_C - 1) // BLOCK_C
        if (block >= 0) & (block < blocks):
            column = (block * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
            inside = (column < WIDTHS[i])[None, :]
            if SCATTER:
                source, target = row, named
                written = (named >= 0)[:, None] & inside
            else:
                source, target = named, row
                written = (row < rows)[:, None] & inside
            read = (named >= 0)[:, None] & inside
            if MORE:
                second = read & (source >= num_first)[:, None]
                read = read & (source < num_first)[:, None]
            x_at = xs[i] + (source * x_rows[i])[:, None] + (column * x_columns[i])[None, :]
            values = tl.load(x_at, mask=read, other=0)
            if MORE:
                at = more[i] + ((source - num_first) * more_rows[i])[:, None] + (column * more_columns[i])[None, :]
                values = tl.where(second, tl.load(at, mask=second, other=0), values)
            tl.store(outs[i] + (target * out_rows[i])[:, None] + column[None, :], values, mask=written)
        block -= blocks
