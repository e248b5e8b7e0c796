"""Attention to selected latents on Hopper, 64 heads a program.

Two warp groups attend, a third gathers. Tiles of 64 keys come in two buffers: group 0 scores the even tiles and sums
the left half of the latent of all of them, group 1 scores the odd tiles and sums the right half. So one group's softmax
runs beside the other's products.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# (types that exist only while Triton compiles)
from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom_patches.kernels.gluon_assembler import gluon_jit

from ._hopper_gather import HALF, KEYS, ROPE, copy_query, fetch, span, used_slots
from ._hopper_softmax import LOG2E, LOWEST, log_sum_exp


@gluon_jit(do_not_specialize=["tokens"])
def wide(
    q, cache, indices, out, lse, tokens, top_k, heads, scale, q_token, q_head, index_row, index_column, row_stride,
    TOP_K2: gl.constexpr, PACKED: gl.constexpr, ATTEND_REGS: gl.constexpr, GATHER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid (tokens * cdiv(heads, 64), splits), num_warps=4. Parts of more than one split: float32 out, and place."""
    HEADS: gl.constexpr = 64
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    blocks = gl.cdiv(heads, HEADS)
    token = (gl.program_id(0) // blocks).to(gl.int64)
    row = (gl.program_id(0) % blocks) * HEADS
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, HALF], shared)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, HALF], shared)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, ROPE], shared)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], shared)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], shared)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], shared)
    tops = gl.allocate_shared_memory(gl.float32, [2, HEADS], flat)
    totals = gl.allocate_shared_memory(gl.float32, [2, HEADS], flat)
    query = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query, 128)
    for b in gl.static_range(2):
        mbarrier.init(full.index(b), 129 if PACKED else 128)
        mbarrier.init(ready.index(b), 1)
        mbarrier.init(done.index(b), 1)
        mbarrier.init(left_free.index(b), 1)
        mbarrier.init(right_free.index(b), 1)
    gl.thread_barrier()
    copy_query(q + token * q_token, q_left.index(0), q_right.index(0), q_rope.index(0), row, heads, q_head)
    async_copy.mbarrier_arrive(query, increment_count=False)
    line = indices + token * index_row
    begin, end = span(line, index_column, top_k, split, splits, 2 * KEYS, TOP_K2)
    pairs = gl.cdiv(gl.maximum(end - begin, 0), 2 * KEYS)
    place = (split * tokens + token) * heads
    written = (splits == 1) | (begin < end)
    factor = scale * LOG2E
    gl.warp_specialize(
        [
            (_attend, (0, q_left, q_right, q_rope, left, right, rope, tops, totals, query, full, ready, done,
                       left_free, line, index_column, out, lse, row, heads, place, begin, end, pairs, factor,
                       written)),
            (_attend, (1, q_left, q_right, q_rope, left, right, rope, tops, totals, query, full, ready, done,
                       right_free, line, index_column, out, lse, row, heads, place, begin, end, pairs, factor,
                       written)),
            (fetch, (line, index_column, cache, row_stride, left, right, rope, full, left_free, right_free, begin, end,
                     2 * pairs, 2, PACKED)),
        ],
        [4, 4],
        [ATTEND_REGS, GATHER_REGS],
    )  # fmt: skip


@gluon_jit
def _attend(
    W: gl.constexpr, q_left, q_right, q_rope, left, right, rope, tops, totals, query, full, ready, done, mine_free,
    line, column, out, lse, row, heads, place, begin, end, pairs, factor, written,
):  # fmt: skip
    """Warp group W of `wide`. The weights of a tile take the place of the rope part of its keys."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    by_score: gl.constexpr = gl.SliceLayout(1, SCORE)
    by_sum: gl.constexpr = gl.SliceLayout(1, SUM)
    HEADS: gl.constexpr = q_left.shape[1]
    o = gl.zeros([HEADS, HALF], gl.float32, SUM)
    total = gl.zeros([HEADS], gl.float32, by_score)
    top = gl.full([HEADS], LOWEST, gl.float32, by_score)
    number = begin + W * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORE))
    if W == 0:  # noqa: SIM108 (known while it compiles)
        values = left
    else:
        values = right
    mbarrier.wait(query, 0)
    for pair in range(pairs):
        phase = pair & 1
        first = zero(pair)
        second = first + 1
        mine = first + W
        used = used_slots(line, column, number, end)
        number += 2 * KEYS
        mbarrier.wait(full.index(W), phase)
        fence_async_shared()
        s = _scores(
            q_left.index(first), q_right.index(first), q_rope.index(first), left.index(mine), right.index(mine),
            rope.index(mine), SCORE,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        if W == 0:
            p, higher = _weights(s, used, top, factor)
            tops.index(0).store(higher)
            rope.index(0).store(p.to(gl.bfloat16))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(0))
            fade = gl.exp2(top - higher)
            total = total * fade + gl.sum(p, 1)
            o = o * gl.convert_layout(fade, by_sum)[:, None]
            o = warpgroup_mma(rope.index(first), values.index(first), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            gl.thread_barrier()
            mbarrier.arrive(mine_free.index(0))
            mbarrier.wait(ready.index(1), phase)
            top = tops.index(1).load(by_score)
            fade = gl.exp2(higher - top)
            total = total * fade
            mbarrier.wait(full.index(1), phase)
            fence_async_shared()
            o = o * gl.convert_layout(fade, by_sum)[:, None]
            o = warpgroup_mma(rope.index(second), values.index(second), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            gl.thread_barrier()
            mbarrier.arrive(mine_free.index(1))
        else:
            mbarrier.wait(ready.index(0), phase)
            before = tops.index(0).load(by_score)
            fade = gl.exp2(top - before)
            total = total * fade
            mbarrier.wait(full.index(0), phase)
            fence_async_shared()
            o = o * gl.convert_layout(fade, by_sum)[:, None]
            o = warpgroup_mma(rope.index(first), values.index(first), o, is_async=True)
            p, top = _weights(s, used, before, factor)
            tops.index(1).store(top)
            rope.index(1).store(p.to(gl.bfloat16))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(1))
            fade = gl.exp2(before - top)
            total = total * fade + gl.sum(p, 1)
            o = warpgroup_mma_wait(0, deps=[o])
            gl.thread_barrier()
            mbarrier.arrive(mine_free.index(0))
            o = o * gl.convert_layout(fade, by_sum)[:, None]
            o = warpgroup_mma(rope.index(second), values.index(second), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            gl.thread_barrier()
            mbarrier.arrive(mine_free.index(1))
    totals.index(W).store(total)
    gl.thread_barrier()
    mbarrier.arrive(done.index(W))
    mbarrier.wait(done.index(1 - W), 0)
    total += totals.index(1 - W).load(by_score)
    _finish(W, o, total, top, values.index(0), out, lse, row, heads, place, written)


@gluon_jit
def zero(number):
    """0, which the compiler does not know: what is added to it is no invariant of a loop.

    The descriptors of all the products in a loop would be kept in registers, more of them than there are.
    """
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon_jit
def _scores(q_left, q_right, q_rope, left, right, rope, LAYOUT: gl.constexpr):
    """[HEADS, KEYS] products of queries and keys."""
    HEADS: gl.constexpr = q_left.shape[0]
    s = gl.zeros([HEADS, KEYS], gl.float32, LAYOUT)
    s = warpgroup_mma(q_left, left.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_right, right.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
    return s


@gluon_jit
def _weights(s, used, top, factor):
    """A step of the running softmax: exp2(score - top), the new top."""
    s = gl.where(used[None, :], s * factor, float("-inf"))
    higher = gl.maximum(top, gl.max(s, 1))
    return gl.exp2(s - higher[:, None]), higher


@gluon_jit
def _finish(W: gl.constexpr, o, total, top, staging, out, lse, row, heads, place, written):
    """Write a warp group's half of the result, and the log-sum-exp once."""
    by_score: gl.constexpr = total.type.layout
    some = total > 0.0
    HEADS: gl.constexpr = total.shape[0]
    if W == 0:
        head = row + gl.arange(0, HEADS, by_score)
        gl.store(lse + place + head, log_sum_exp(top, total), mask=head < heads)
    norm = gl.convert_layout(1.0 / gl.where(some, total, 1.0), gl.SliceLayout(1, o.type.layout))
    o = o * norm[:, None]
    if out.dtype.element_ty == gl.float32:
        layout: gl.constexpr = o.type.layout
        result = o
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        staging.store(o.to(out.dtype.element_ty))
        gl.thread_barrier()
        result = staging.load(layout)
    head = row + gl.arange(0, HEADS, gl.SliceLayout(1, layout))
    column = W * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = (place + head)[:, None] * (2 * HALF) + column[None, :]
    gl.store(out + at, result, mask=((head < heads) & written)[:, None])
