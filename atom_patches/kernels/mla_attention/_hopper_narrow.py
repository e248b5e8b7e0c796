"""Attention to selected latents on Hopper, 16 heads a program.

Keys are the rows of the products, S^T [64, 16] = K Q^T and O^T [512, 16] = V^T P^T, so that nothing of a product is
padding; one warp group attends, one gathers.
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
def narrow(
    q, cache, indices, out, lse, tokens, top_k, heads, scale, q_token, q_head, index_row, index_column, row_stride,
    TOP_K2: gl.constexpr, PACKED: gl.constexpr, GATHER_REGS: gl.constexpr,
):  # fmt: skip
    """Grid (tokens * cdiv(heads, HEADS), splits), num_warps=4."""
    HEADS: gl.constexpr = 16
    BUFFERS: gl.constexpr = 2
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    blocks = gl.cdiv(heads, HEADS)
    token = (gl.program_id(0) // blocks).to(gl.int64)
    row = (gl.program_id(0) % blocks) * HEADS
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    q_left = gl.allocate_shared_memory(gl.bfloat16, [HEADS, HALF], shared)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [HEADS, HALF], shared)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [HEADS, ROPE], shared)
    left = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, KEYS, HALF], shared)
    right = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, KEYS, HALF], shared)
    rope = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, KEYS, ROPE], shared)
    weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], shared)
    query = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query, 128)
    for b in gl.static_range(BUFFERS):
        mbarrier.init(full.index(b), 129 if PACKED else 128)
        mbarrier.init(left_free.index(b), 1)
        mbarrier.init(right_free.index(b), 1)
    gl.thread_barrier()
    copy_query(q + token * q_token, q_left, q_right, q_rope, row, heads, q_head)
    async_copy.mbarrier_arrive(query, increment_count=False)
    line = indices + token * index_row
    begin, end = span(line, index_column, top_k, split, splits, KEYS, TOP_K2)
    tiles = gl.cdiv(gl.maximum(end - begin, 0), KEYS)
    place = (split * tokens + token) * heads
    written = (splits == 1) | (begin < end)
    factor = scale * LOG2E
    gl.warp_specialize(
        [
            (_attend, (q_left, q_right, q_rope, left, right, rope, weights, query, full, left_free, right_free,
                              line, index_column, out, lse, row, heads, place, begin, end, tiles, factor, written,
                              BUFFERS)),
            (fetch, (line, index_column, cache, row_stride, left, right, rope, full, left_free, right_free, begin,
                      end, tiles, BUFFERS, PACKED)),
        ],
        [4],
        [GATHER_REGS],
    )  # fmt: skip


@gluon_jit
def _attend(
    q_left, q_right, q_rope, left, right, rope, weights, query, full, left_free, right_free, line, column, out, lse,
    row, heads, place, begin, end, tiles, factor, written, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Keys and latent values are rows of the sums, heads are columns."""
    HEADS: gl.constexpr = q_left.shape[0]
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    by_head: gl.constexpr = gl.SliceLayout(0, M)
    o_left = gl.zeros([HALF, HEADS], gl.float32, M)
    o_right = gl.zeros([HALF, HEADS], gl.float32, M)
    totals = gl.zeros([KEYS, HEADS], gl.float32, M)
    top = gl.full([HEADS], LOWEST, gl.float32, by_head)
    number = begin + gl.arange(0, KEYS, gl.SliceLayout(1, M))
    following = used_slots(line, column, number, end)
    mbarrier.wait(query, 0)
    for i in range(tiles):
        b = i % BUFFERS
        used = following
        number += KEYS
        mbarrier.wait(full.index(b), (i // BUFFERS) & 1)
        fence_async_shared()
        s = gl.zeros([KEYS, HEADS], gl.float32, M)
        s = warpgroup_mma(left.index(b), q_left.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(right.index(b), q_right.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(rope.index(b), q_rope.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where(used[:, None], s * factor, float("-inf"))
        higher = gl.maximum(top, gl.max(s, 0))
        p = gl.exp2(s - higher[None, :])
        fade = gl.exp2(top - higher)[None, :]
        top = higher
        weights.store(gl.permute(p.to(gl.bfloat16), (1, 0)))
        fence_async_shared()
        gl.thread_barrier()
        following = used_slots(line, column, number, end)  # a fence waits for what is asked for before it
        turned = weights.permute((1, 0))
        o_left = warpgroup_mma(left.index(b).permute((1, 0)), turned, o_left * fade, is_async=True)
        o_right = warpgroup_mma(right.index(b).permute((1, 0)), turned, o_right * fade, is_async=True)
        totals = totals * fade + p
        o_left = warpgroup_mma_wait(1, deps=[o_left])
        gl.thread_barrier()
        mbarrier.arrive(left_free.index(b))
        o_right = warpgroup_mma_wait(0, deps=[o_right])
        gl.thread_barrier()
        mbarrier.arrive(right_free.index(b))
    total = gl.sum(totals, 0)
    some = total > 0.0
    head = row + gl.arange(0, HEADS, by_head)
    gl.store(lse + place + head, log_sum_exp(top, total), mask=head < heads)
    norm = (1.0 / gl.where(some, total, 1.0))[None, :]
    column_at = gl.arange(0, HALF, gl.SliceLayout(1, M))
    at = (place + head)[None, :] * (2 * HALF) + column_at[:, None]
    inside = ((head < heads) & written)[None, :]
    gl.store(out + at, (o_left * norm).to(out.dtype.element_ty), mask=inside)
    gl.store(out + HALF + at, (o_right * norm).to(out.dtype.element_ty), mask=inside)
