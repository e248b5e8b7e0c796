"""Triton kernel of the first part of `gdn_prefill`: convolution, activation, and l2 norm of queries and keys."""

from __future__ import annotations

import triton.language as tl

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.gated_delta_rule._chunk_kernels import find_sequence


@jit
def silu(x, FAST: tl.constexpr):
    """x sigmoid(x); with FAST by NVIDIA's tanh instruction, whose error of 2^-11 half precision does not show."""
    if FAST:
        half = 0.5 * x
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        return half + half * tanh
    return x * tl.sigmoid(x)


@jit
def remember(window, memory, start, known, s_j, TAPS: tl.constexpr):
    """Add to the window what a slot holds of the inputs before the sequence; only the first rows look so far back."""
    found = ()
    for past in tl.static_range(1 - TAPS, 0):  # type: ignore[misc]
        back = start + past
        taken = (back < 0)[:, None] & known[None, :]
        kept = tl.load(memory + (back + TAPS - 1)[:, None] * s_j, mask=taken, other=0.0).to(tl.float32)
        found = found + (window[past + TAPS - 1] + kept,)
    return found


@jit(do_not_specialize=["num_seqs", "total", "null_slot"])
def convolve_kernel(
    x,
    weight,
    bias,
    state,
    slots,
    resumed,
    cu_seqlens,
    heads,  # [QK_HEADS, T, K], the queries' heads before the keys', and behind it [HV, T, V]
    num_seqs,
    total,
    eps,
    null_slot,
    x_t,
    x_d,
    w_d,
    w_j,
    s_n,
    s_d,
    s_j,
    QK_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    PAST: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    EARLY: tl.constexpr,
    BC: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    FAST: tl.constexpr,
    WITH_RESUMED: tl.constexpr,
    WITH_NULL: tl.constexpr,
    WITH_UPDATE: tl.constexpr,
):
    """ROWS rows of one head of x, written head by head. The program of a sequence's first rows reads the sequence's
    past inputs and, with WITH_UPDATE, leaves its last ones: no other program touches them. PAST is a power of two, at
    least TAPS - 1."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(cu_seqlens, num_seqs, chunk, SINGLE, ROWS)
    if sequence < 0:
        return
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    first = begin + (chunk - (begin.to(tl.int32) // ROWS + sequence)).to(tl.int64) * ROWS
    slot = tl.load(slots + sequence).to(tl.int64)
    real = slot >= 0
    if WITH_NULL:
        real = real & (slot != null_slot)
    if (first >= end) | (not real):
        return

    is_value = head >= QK_HEADS
    size = tl.where(is_value, V, K)
    column = tl.arange(0, BC)
    known = column < size
    before = tl.where(is_value, QK_HEADS * K + (head - QK_HEADS) * V, head * K)
    channel = before + column
    # A thread takes RUN consecutive rows of its channels and keeps the window of past inputs in registers.
    start = tl.arange(0, ROWS // RUN) * RUN
    rows = tl.minimum(end - first, ROWS).to(tl.int32)
    earlier = tl.minimum(first - begin, ROWS).to(tl.int32)
    here = x + first * x_t + start[:, None] * x_t + channel[None, :] * x_d
    window = ()
    for past in tl.static_range(1 - TAPS, 0):
        taken = (start + past >= -earlier) & (start + past < rows)
        window = window + (tl.load(here + past * x_t, mask=taken[:, None] & known[None, :], other=0.0).to(tl.float32),)
    if first == begin:
        old = False
        if WITH_RESUMED:
            old = tl.load(resumed + sequence) != 0
        memory = state + slot * s_n + channel[None, :] * s_d
        if old:
            window = remember(window, memory, start, known, s_j, TAPS)
        if WITH_UPDATE:
            j = tl.arange(0, PAST)
            last = end - (TAPS - 1) + j
            kept = (j < TAPS - 1)[:, None] & known[None, :]
            newest = x + last[:, None] * x_t + channel[None, :] * x_d
            recent = tl.load(newest, mask=kept & (last >= begin)[:, None], other=0.0).to(tl.float32)
            shifted = memory + (last - begin + TAPS - 1)[:, None] * s_j
            recent += tl.load(shifted, mask=kept & (last < begin)[:, None] & old, other=0.0).to(tl.float32)
            tl.debug_barrier()  # every thread has read the past before any overwrites it
            tl.store(memory + j[:, None] * s_j, recent.to(state.dtype.element_ty), mask=kept)

    factors = ()
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + channel * w_d + tap * w_j, mask=known, other=0.0).to(tl.float32)
        factors = factors + (factor[None, :],)
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    target = heads + (before.to(tl.int64) * total + first * size)
    rows_read = ()
    if EARLY:
        for i in tl.static_range(RUN):
            live = (start + i < rows)[:, None] & known[None, :]
            rows_read = rows_read + (tl.load(here + i * x_t, mask=live, other=0.0),)
    for i in tl.static_range(RUN):
        live = (start + i < rows)[:, None] & known[None, :]
        if EARLY:
            window = window + (rows_read[i].to(tl.float32),)
        else:
            window = window + (tl.load(here + i * x_t, mask=live, other=0.0).to(tl.float32),)
        y = window[0] * factors[0]
        for tap in tl.static_range(1, TAPS):
            y += window[tap] * factors[tap]
        window = window[1:]
        if HAS_BIAS:
            y += offset
        if SILU:
            y = silu(y, FAST)
        if not is_value:
            y *= tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
        tl.store(target + (start + i)[:, None] * size + column[None, :], y.to(heads.dtype.element_ty), mask=live)
