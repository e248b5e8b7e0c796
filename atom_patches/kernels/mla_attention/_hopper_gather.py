"""How a warp group gathers keys for the others, on Hopper: from the slots of a query to tiles in shared memory.

Gathering is the work of one warp group alone, so that nobody who multiplies waits for memory. A tile is two halves of
the latent and the rope part; each half of a buffer is taken again as soon as nobody reads it any more.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportAssignmentType=false
# (types that exist only while Triton compiles)
from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from atom_patches.kernels.gluon_assembler import gluon_jit

KEYS = gl.constexpr(64)
"""Of a tile."""

HALF = gl.constexpr(256)
"""Values of half a latent."""

ROPE = gl.constexpr(64)


@gluon_jit
def span(line, column, top_k, split, splits, TOGETHER: gl.constexpr, TOP_K2: gl.constexpr):
    """The part of a split: up to the last entry in use, in multiples of TOGETHER."""
    each: gl.constexpr = gl.BlockedLayout([max(1, TOP_K2 // 128)], [32], [4], [0])
    every = gl.arange(0, TOP_K2, each)
    slot = gl.load(line + every * column, mask=every < top_k, other=-1)
    end = gl.max(gl.where(slot >= 0, every + 1, 0), 0)
    part = gl.cdiv(gl.cdiv(end, TOGETHER), splits) * TOGETHER
    begin = split * part
    return begin, gl.minimum(begin + part, end)


@gluon_jit
def _copy(to, source, at, used, first, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy COLUMNS values from `first` of the rows at `at` (offsets); rows not used become zeros."""
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    pointers = source + (at[:, None] + column[None, :])
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])
    async_copy.async_copy_global_to_shared(to, pointers, mask=used[:, None])


@gluon_jit
def copy_query(q, q_left, q_right, q_rope, row, heads, q_head):
    """Start to copy the heads from `row` on of a query; heads that are not there become zeros."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEADS: gl.constexpr = q_left.shape[0]
    head = row + gl.arange(0, HEADS, gl.SliceLayout(1, lines))
    at = head * q_head
    _copy(q_left, q, at, head < heads, 0, HALF, lines)
    _copy(q_right, q, at, head < heads, HALF, HALF, lines)
    _copy(q_rope, q, at, head < heads, 2 * HALF, ROPE, lines)


@gluon_jit
def used_slots(line, column, number, end):
    """Whether entries of a query's slots name a token."""
    return gl.load(line + number * column, mask=number < end, other=-1) >= 0


@gluon_jit
def fetch(
    line, column, cache, row_stride, left, right, rope, full, left_free, right_free, begin, end, tiles,
    BUFFERS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    if PACKED:
        _gather_packed(
            line, column, cache, row_stride, left, right, rope, full, left_free, right_free, begin, end, tiles, BUFFERS
        )
    else:
        _gather(
            line, column, cache, row_stride, left, right, rope, full, left_free, right_free, begin, end, tiles, BUFFERS
        )


@gluon_jit
def _gather(
    line, column, cache, row_stride, left, right, rope, full, left_free, right_free, begin, end, tiles,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """The warp group that copies the keys of one tile after the other into buffers as they become free.

    Eight lanes read 128 bytes of a key, which are a line of the memory and of the swizzled buffer.
    """
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    number = begin + gl.arange(0, KEYS, gl.SliceLayout(1, lines))
    slot = gl.load(line + number * column, mask=number < end, other=-1)
    for i in range(tiles):
        number += KEYS
        following = gl.load(line + number * column, mask=number < end, other=-1)
        b = i % BUFFERS
        phase = ((i // BUFFERS) & 1) ^ 1
        used = slot >= 0
        at = gl.where(used, slot, 0).to(gl.int64) * row_stride
        mbarrier.wait(left_free.index(b), phase)
        _copy(left.index(b), cache, at, used, 0, HALF, lines)
        mbarrier.wait(right_free.index(b), phase)
        _copy(right.index(b), cache, at, used, HALF, HALF, lines)
        _copy(rope.index(b), cache, at, used, 2 * HALF, ROPE, lines)
        async_copy.mbarrier_arrive(full.index(b), increment_count=False)
        slot = following


@gluon_jit
def _raw(cache, at, used, EIGHTH: gl.constexpr, LAYOUT: gl.constexpr):
    """An eighth of the latent values of packed rows: [KEYS, 16] words of four E4M3 values.

    As words, because a byte would take a register of its own.
    """
    column = EIGHTH * 16 + gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    pointers = cache + (at[:, None] + column[None, :])
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 8]), [1, 2])
    return gl.load(pointers, mask=used[:, None], other=0)


@gluon_jit
def _scales(cache, at, used, GROUP: gl.constexpr):
    """The scales of a group of 128 values of packed rows, [KEYS] float32."""
    return gl.load(cache + (at + (HALF // 2 + GROUP)), mask=used, other=0).to(gl.float32, bitcast=True)


@gluon_jit
def _unpack(to, raw, scale):
    """Store [KEYS, 16] words of four E4M3 values, times their row's scale, as [KEYS, 32] words of two bfloat16."""
    scale, raw = gl.broadcast(scale[:, None], raw)
    first, second = gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, c, d;
        .reg .b32 low, high;
        .reg .f32 e, f, g, h;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 low, a;
        cvt.rn.f16x2.e4m3x2 high, b;
        mov.b32 {a, b}, low;
        mov.b32 {c, d}, high;
        cvt.f32.f16 e, a;
        cvt.f32.f16 f, b;
        cvt.f32.f16 g, c;
        cvt.f32.f16 h, d;
        mul.f32 e, e, $3;
        mul.f32 f, f, $3;
        mul.f32 g, g, $3;
        mul.f32 h, h, $3;
        cvt.rn.bf16x2.f32 $0, f, e;
        cvt.rn.bf16x2.f32 $1, h, g;
        }""",
        "=r,=r,r,f", [raw, scale], (gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    to.store(gl.reshape(gl.join(first, second), [KEYS, 32]))


@gluon_jit
def _gather_packed(
    line, column, cache, row_stride, left, right, rope, full, left_free, right_free, begin, end, tiles,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """As `_gather`, from packed rows as words: they come through registers, half a tile ahead, and become bfloat16."""
    lines: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    number = begin + gl.arange(0, KEYS, gl.SliceLayout(1, lines))
    column_rope = HALF // 2 + 4 + gl.arange(0, ROPE // 2, gl.SliceLayout(0, narrow))
    slot = gl.load(line + number * column, mask=number < end, other=-1)
    used = slot >= 0
    at = gl.where(used, slot, 0).to(gl.int64) * row_stride
    scale_0 = _scales(cache, at, used, 0)
    raw_0 = _raw(cache, at, used, 0, lines)
    raw_1 = _raw(cache, at, used, 1, lines)
    scale_1 = _scales(cache, at, used, 1)
    raw_2 = _raw(cache, at, used, 2, lines)
    raw_3 = _raw(cache, at, used, 3, lines)
    for i in range(tiles):
        number += KEYS
        following = gl.load(line + number * column, mask=number < end, other=-1)
        b = i % BUFFERS
        phase = ((i // BUFFERS) & 1) ^ 1
        mbarrier.wait(left_free.index(b), phase)
        to = left.index(b)._reinterpret(gl.int32, [KEYS, HALF // 2], words)
        _unpack(to.slice(0, 32, dim=1), raw_0, scale_0)
        raw_0 = _raw(cache, at, used, 4, lines)
        _unpack(to.slice(32, 32, dim=1), raw_1, scale_0)
        scale_0 = _scales(cache, at, used, 2)
        raw_1 = _raw(cache, at, used, 5, lines)
        _unpack(to.slice(64, 32, dim=1), raw_2, scale_1)
        raw_2 = _raw(cache, at, used, 6, lines)
        _unpack(to.slice(96, 32, dim=1), raw_3, scale_1)
        scale_1 = _scales(cache, at, used, 3)
        raw_3 = _raw(cache, at, used, 7, lines)
        mbarrier.wait(right_free.index(b), phase)
        at_rope = gl.convert_layout(at, gl.SliceLayout(1, narrow), assert_trivial=True)
        used_rope = gl.convert_layout(used, gl.SliceLayout(1, narrow), assert_trivial=True)
        from_rope = cache + (at_rope[:, None] + column_rope[None, :])
        from_rope = gl.max_contiguous(gl.multiple_of(from_rope, [1, 16]), [1, 4])
        to_rope = rope.index(b)._reinterpret(gl.int32, [KEYS, ROPE // 2], words)
        async_copy.async_copy_global_to_shared(to_rope, from_rope, mask=used_rope[:, None])
        async_copy.mbarrier_arrive(full.index(b), increment_count=False)
        used = following >= 0
        at = gl.where(used, following, 0).to(gl.int64) * row_stride
        to = right.index(b)._reinterpret(gl.int32, [KEYS, HALF // 2], words)
        _unpack(to.slice(0, 32, dim=1), raw_0, scale_0)
        raw_0 = _raw(cache, at, used, 0, lines)
        _unpack(to.slice(32, 32, dim=1), raw_1, scale_0)
        scale_0 = _scales(cache, at, used, 0)
        raw_1 = _raw(cache, at, used, 1, lines)
        _unpack(to.slice(64, 32, dim=1), raw_2, scale_1)
        raw_2 = _raw(cache, at, used, 2, lines)
        _unpack(to.slice(96, 32, dim=1), raw_3, scale_1)
        scale_1 = _scales(cache, at, used, 1)
        raw_3 = _raw(cache, at, used, 3, lines)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(b))
