"""Triton kernel of the first part of `gdn_prefill`: convolution, activation, and l2 norm of queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_patches.kernels.gated_delta_rule._chunk_kernels import find_sequence


@triton.jit
def convolve_kernel(
    x,
    weight,
    bias,
    state,
    slots,
    resumed,
    cu_seqlens,
    unit,  # [QK_HEADS, T, K], the queries' heads before the keys'
    values,  # [HV, T, V]
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
    BC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    WITH_RESUMED: tl.constexpr,
    WITH_NULL: tl.constexpr,
    WITH_UPDATE: tl.constexpr,
):
    """ROWS rows of one head of x, written head by head. The program of a sequence's first rows reads the sequence's
    past inputs and, with WITH_UPDATE, leaves its last ones: no other program touches them. PAST is a power of two, at
    least TAPS - 1."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(cu_seqlens, num_seqs, chunk, ROWS)
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
    channel = tl.where(is_value, QK_HEADS * K + (head - QK_HEADS) * V, head * K) + column
    row = tl.arange(0, ROWS)
    live = (first + row < end)[:, None] & known[None, :]
    here = x + first * x_t + channel[None, :] * x_d
    y = tl.zeros([ROWS, BC], tl.float32)
    for tap in tl.static_range(TAPS):
        source = row + (tap - TAPS + 1)
        factor = tl.load(weight + channel * w_d + tap * w_j, mask=known, other=0.0).to(tl.float32)
        taken = live & (first + source >= begin)[:, None]
        y += tl.load(here + source[:, None] * x_t, mask=taken, other=0.0).to(tl.float32) * factor[None, :]
    if first == begin:
        old = False
        if WITH_RESUMED:
            old = tl.load(resumed + sequence) != 0
        memory = state + slot * s_n + channel[None, :] * s_d
        if old:
            for tap in tl.static_range(TAPS - 1):
                source = row + (tap - TAPS + 1)
                factor = tl.load(weight + channel * w_d + tap * w_j, mask=known, other=0.0).to(tl.float32)
                taken = live & (source < 0)[:, None]
                past = tl.load(memory + (source + TAPS - 1)[:, None] * s_j, mask=taken, other=0.0)
                y += past.to(tl.float32) * factor[None, :]
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

    if HAS_BIAS:
        y += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    if is_value:
        target = values + ((head - QK_HEADS).to(tl.int64) * total + first) * V
        tl.store(target + row[:, None] * V + column[None, :], y.to(values.dtype.element_ty), mask=live)
    else:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
        target = unit + (head.to(tl.int64) * total + first) * K
        tl.store(target + row[:, None] * K + column[None, :], y.to(unit.dtype.element_ty), mask=live)
