"""Merging partial attention in Triton: few parts by blocks of rows, many parts with a program a row and head."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no

from . import room_like

LARGEST_HEAD = 1024
MOST_PARTS = 1024
#: Rows times heads up to which two parts are read at once with their weights: the bytes matter less than the wait.
FEW_PAIRS = 4096
#: Parts up to which a program reads all of them at once, for a block of rows.
FEW_PARTS = 8


def supports_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Verdict:
    return _fits(out_a.shape[2])


def supports_merge_attention_parts(outs: Tensor, lses: Tensor) -> Verdict:
    if outs.shape[0] > MOST_PARTS:
        return no(f"{outs.shape[0]} parts; at most {MOST_PARTS}")
    return _fits(outs.shape[3])


def _fits(head_size: int) -> Verdict:
    return YES if head_size <= LARGEST_HEAD else no(f"a head of {head_size} values; at most {LARGEST_HEAD}")


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, size = out_a.shape
    out, lse = room_like(out_a)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf)
    block = triton.next_power_of_2(size)
    few = rows * heads <= FEW_PAIRS
    pairs = max(1, (1024 if few else 2048) // block)
    _merge_two[(triton.cdiv(rows * heads, pairs),)](
        out, lse, out_a, lse_a, out_b, lse_b, rows * heads,
        *lse.stride(), *out_a.stride(), *lse_a.stride(), *out_b.stride(), *lse_b.stride(),
        HEADS=heads, SIZE=size, BLOCK=block, PAIRS=pairs, AT_ONCE=few, num_warps=4,
    )  # fmt: skip
    return out, lse


def merge_attention_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = room_like(outs[0])
    merge_into(out, lse, outs, lses)
    return out, lse


def merge_into(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    """Merge outs [P, T, H, D] and lses [P, T, H] into out [T, H, D], whose dtype may be another, and lse [T, H].

    Where a part's lse is -inf or +inf its output is not read at all.
    """
    parts, rows, heads, size = outs.shape
    if out.numel() == 0:
        lse.fill_(-torch.inf)
        return
    block = triton.next_power_of_2(size)
    lanes = triton.next_power_of_2(parts)
    if parts <= FEW_PARTS:
        pairs = max(1, 1024 // block)
        _merge_few[(triton.cdiv(rows * heads, pairs),)](
            out, lse, outs, lses, parts, rows * heads,
            *out.stride(), *lse.stride(), *outs.stride(), *lses.stride(),
            HEADS=heads, SIZE=size, BLOCK=block, PARTS=lanes, PAIRS=pairs, num_warps=4,
        )  # fmt: skip
        return
    chunk = min(lanes, max(1, 4096 // block))
    _merge_parts[(rows, heads)](
        out, lse, outs, lses, parts, *out.stride(), *lse.stride(), *outs.stride(), *lses.stride(),
        SIZE=size, BLOCK=block, LANES=lanes, CHUNK=chunk, num_warps=4 if chunk * block >= 1024 else 1,
    )  # fmt: skip


@jit(do_not_specialize=["pairs", "lse_head", "la_head", "lb_head"])
def _merge_two(
    out, lse, out_a, lse_a, out_b, lse_b, pairs,
    lse_row, lse_head, a_row, a_head, a_dim, la_row, la_head, b_row, b_head, b_dim, lb_row, lb_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """`AT_ONCE` reads both parts without waiting for their weights; else what has no weight is not read."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    real = pair < pairs
    row = pair // HEADS
    head = pair % HEADS
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < SIZE)[None, :]
    from_a = out_a + (row * a_row + head * a_head)[:, None] + column[None, :] * a_dim
    from_b = out_b + (row * b_row + head * b_head)[:, None] + column[None, :] * b_dim
    if AT_ONCE:
        part_a = tl.load(from_a, mask=inside, other=0.0)
        part_b = tl.load(from_b, mask=inside, other=0.0)
    a = _empty_as_minus_inf(tl.load(lse_a + row * la_row + head * la_head, mask=real, other=float("-inf")))
    b = _empty_as_minus_inf(tl.load(lse_b + row * lb_row + head * lb_head, mask=real, other=float("-inf")))
    peak = tl.maximum(a, b)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp(a - base)
    weight_b = tl.exp(b - base)
    total = tl.where(peak == float("-inf"), 1.0, weight_a + weight_b)
    inverse = 1.0 / total
    tl.store(lse + row * lse_row + head * lse_head, peak + tl.log(total), mask=real)
    counts_a = (weight_a > 0.0)[:, None] & inside
    counts_b = (weight_b > 0.0)[:, None] & inside
    if AT_ONCE:
        part_a = tl.where(counts_a, part_a, 0.0)
        part_b = tl.where(counts_b, part_b, 0.0)
    else:
        part_a = tl.load(from_a, mask=counts_a, other=0.0)
        part_b = tl.load(from_b, mask=counts_b, other=0.0)
    merged = part_a.to(tl.float32) * (weight_a * inverse)[:, None]
    merged += part_b.to(tl.float32) * (weight_b * inverse)[:, None]
    to = out + pair[:, None] * SIZE + column[None, :]
    tl.store(to, merged.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["parts", "pairs", "lse_head", "lse_part_stride", "lse_head_stride"])
def _merge_few(
    out, lse, outs, lses, parts, pairs,
    out_row, out_head, out_dim, lse_row, lse_head, part_stride, row_stride, head_stride, dim_stride,
    lse_part_stride, lse_row_stride, lse_head_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """PARTS is the next power of two; pointers step from part to part, whose distance may need 64 bits."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    real = pair < pairs
    row = pair // HEADS
    head = pair % HEADS
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < SIZE)[None, :]
    found = ()
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    at = lses + row * lse_row_stride + head * lse_head_stride
    for part in tl.static_range(PARTS):
        value = _empty_as_minus_inf(tl.load(at, mask=real & (part < parts), other=float("-inf")))
        found = found + (value,)
        peak = tl.maximum(peak, value)
        at += lse_part_stride
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([PAIRS], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.exp(found[part] - base)
    total = tl.where(peak == float("-inf"), 1.0, total)
    inverse = 1.0 / total
    merged = tl.zeros([PAIRS, BLOCK], dtype=tl.float32)
    tiles = outs + (row * row_stride + head * head_stride)[:, None] + column[None, :] * dim_stride
    for part in tl.static_range(PARTS):
        weight = tl.exp(found[part] - base) * inverse
        tile = tl.load(tiles, mask=(weight > 0.0)[:, None] & inside, other=0.0)
        merged += tile.to(tl.float32) * weight[:, None]
        tiles += part_stride
    to = out + (row * out_row + head * out_head)[:, None] + column[None, :] * out_dim
    tl.store(to, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row * lse_row + head * lse_head, peak + tl.log(total), mask=real)


@jit(do_not_specialize=["parts", "lse_head", "lse_part_stride", "lse_head_stride"])
def _merge_parts(
    out, lse, outs, lses, parts,
    out_row, out_head, out_dim, lse_row, lse_head, part_stride, row_stride, head_stride, dim_stride,
    lse_part_stride, lse_row_stride, lse_head_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    lses += row * lse_row_stride + head * lse_head_stride
    outs += row * row_stride + head * head_stride
    lane = tl.arange(0, LANES)
    values = _part_lses(lses, lane, parts, lse_part_stride)
    peak = tl.max(values, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.where(peak == float("-inf"), 1.0, tl.sum(tl.exp(values - base), axis=0))
    inverse = 1.0 / total
    last = tl.max(tl.where(values == float("-inf"), -1, lane), axis=0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    merged = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, last + 1, CHUNK):
        part = first + tl.arange(0, CHUNK)
        weight = tl.exp(_part_lses(lses, part, parts, lse_part_stride) - base) * inverse
        at = outs + part.to(tl.int64)[:, None] * part_stride + column[None, :] * dim_stride
        tile = tl.load(at, mask=(weight > 0.0)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        merged += tl.sum(tile * weight[:, None], axis=0)
    to = out + row * out_row + head * out_head + column * out_dim
    tl.store(to, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row * lse_row + head * lse_head, peak + tl.log(total))


@jit
def _part_lses(lses, part, parts, stride):
    return _empty_as_minus_inf(tl.load(lses + part.to(tl.int64) * stride, mask=part < parts, other=float("-inf")))


@jit
def _empty_as_minus_inf(lse):
    return tl.where(lse == float("inf"), float("-inf"), lse)
