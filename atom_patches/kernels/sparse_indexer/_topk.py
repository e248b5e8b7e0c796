"""The k largest of a row, without sorting it.

A program holds BLOCK values in registers: the k best so far and the next BLOCK - k of the row. The k-th largest is
found by bisection over the values' order-preserving integers, counting in registers; then the winners move to the front
in their order. Equal values at the border are taken from the left, so the result is the stable one whatever the
blocks are. Short of rows, a row is cut into parts, and the parts' winners are candidates of a second pass.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (types that exist only while Triton compiles)
from __future__ import annotations

import triton.language as tl

from atom_patches.kernels.assembler import jit

ABSENT = tl.constexpr(-(2**31))


@jit
def _order(x, inside):
    """Integers in the order of the values: equal for equal ones, ABSENT for what cannot be taken."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(inside & (x > float("-inf")), rank, ABSENT)


@jit
def _border(rank, k, least):
    """The largest border with at least k ranks at or above it.

    More than k ranks are not ABSENT, and at least k are not below `least`.
    """
    low = tl.maximum(tl.min(tl.where(rank > ABSENT, rank, 2147483647)), least).to(tl.int64)
    high = tl.max(rank).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count = tl.sum((rank >= middle.to(tl.int32)).to(tl.int32))
        high = tl.where(count == k, middle + 1, tl.where(count > k, high, middle))
        low = tl.where(count >= k, middle, low)
    return low.to(tl.int32)


@jit
def _named(names, winners, lane, base, stop, held, k, MERGE: tl.constexpr):
    """The columns in the lanes: first those held so far, from lane k on the next ones; and which lanes have one."""
    fresh = base + lane - k
    inside = (lane >= k) & (fresh < stop)
    index = fresh
    if MERGE:
        index = tl.load(names + fresh, mask=inside, other=-1)
        inside = inside & (index >= 0)
    kept = lane < held
    return tl.where(kept, tl.load(winners + lane, mask=kept, other=0), index), inside | kept


@jit(do_not_specialize=["row_stride", "parts"])
def select(
    logits, candidates, start, end, out, k, step, row_stride, column_stride, start_stride, end_stride, parts,
    HAS_START: tl.constexpr, MERGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The winners of one part of one row into out[row, part, :k], counted from the row's start.

    A part is at least `step` (BLOCK - k) values. With MERGE, the values are those that the `parts` parts of
    `candidates` name, and the program takes them all.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = 0
    if HAS_START:
        first = tl.load(start + row * start_stride)
    length = tl.maximum(tl.load(end + row * end_stride) - first, 0)
    size = tl.maximum(tl.cdiv(length, parts), step)
    line = logits + row * row_stride + first.to(tl.int64) * column_stride if HAS_START else logits + row * row_stride
    if MERGE:
        winners = out + row * k
        names = candidates + row * parts * k
        begin = 0
        stop = tl.cdiv(length, size) * k
    else:
        winners = out + (row * parts + part) * k
        names = candidates
        begin = tl.minimum(part * size, length)
        stop = tl.minimum(begin + size, length)
    lane = tl.arange(0, BLOCK)
    held = 0
    border = ABSENT
    for base in range(begin, stop, step):
        index, inside = _named(names, winners, lane, base, stop, held, k, MERGE)
        x = tl.load(line + index.to(tl.int64) * column_stride, mask=inside, other=float("-inf"))
        rank = _order(x, inside)
        found = tl.sum((rank > ABSENT).to(tl.int32))
        if found > k:
            border = _border(rank, k, border)
        above = rank > border
        level = (rank == border) & (rank > ABSENT)
        room = k - tl.sum(above.to(tl.int32))
        taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.debug_barrier()  # the columns are loaded again rather than held in registers through the bisection
        index, inside = _named(names, winners, lane, base, stop, held, k, MERGE)
        tl.debug_barrier()
        tl.store(winners + place, index, mask=taken)
        tl.debug_barrier()
        held = tl.minimum(found, k)
    tl.store(winners + lane, tl.full((BLOCK,), -1, tl.int32), mask=(lane >= held) & (lane < k))
