"""Triton kernels of the chunked gated delta rule: what a chunk is before its state is known, and the scan.

With the notation of `chunk_reference` and D = diag(beta), the writes of a chunk that starts from S0 are

    u = (I + L)^-1 D (v - e^b S0 k)

`prepare_kernel` computes, for every chunk at once, the matrix (I + L)^-1 D ("solve"), how queries read writes
("scores"), and the decays since the chunk's start and until its end. `scan_kernel` walks one sequence, one head
and one block of value columns from chunk to chunk, with the transposed state [K, BV] in registers, and reads and
writes as it goes, so that neither the chunks' states nor their writes go through memory.

Chunks are numbered without counting them: chunk j of sequence i has number cu[i] // BT + i + j. Since a sequence
of n rows from row a has at most (a + n) // BT - a // BT + 1 chunks, numbers never meet, and T // BT + N bounds
them. Numbers that no chunk has belong to programs that return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: exp() of anything below -104 is exactly 0 in float32: the bound changes no result, and keeps -inf out of b_t - b_s.
LOG_ZERO = tl.constexpr(-200.0)


@triton.jit
def find_sequence(cu_seqlens, num_seqs, chunk, BT: tl.constexpr):
    """The sequence that the chunk number falls to, -1 if it lies before the first."""
    found = 0
    for base in range(0, num_seqs, 128):
        i = base + tl.arange(0, 128)
        first = tl.load(cu_seqlens + i, mask=i < num_seqs, other=0).to(tl.int32) // BT + i
        found += tl.sum(((first <= chunk) & (i < num_seqs)).to(tl.int32), axis=0)
    return found - 1


@triton.jit
def clear_outside(
    out, o_t, o_v, cu_seqlens, num_seqs, block, total, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Zero the rows of out[block * BT : (block + 1) * BT] that no sequence owns; `out` points to the head."""
    begin = tl.load(cu_seqlens).to(tl.int64)
    end = tl.load(cu_seqlens + num_seqs).to(tl.int64)
    first = block.to(tl.int64) * BT
    if (first < total) & ((first < begin) | (first + BT > end)):
        row = first + tl.arange(0, BT)
        outside = (row < total) & ((row < begin) | (row >= end))
        for column in range(0, V, BV):
            c = column + tl.arange(0, BV)
            place = out + row[:, None] * o_t + c[None, :] * o_v
            tl.store(place, tl.zeros([BT, BV], out.dtype.element_ty), mask=outside[:, None] & (c < V)[None, :])


@triton.jit
def softplus(x):
    """log(1 + e^x); for large x it is x."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def log1p(x):
    """log(1 + x) for 0 <= x <= 1, exact to a few units in the last place also for tiny x."""
    wide = 1.0 + x
    return tl.log(wide) * (x / tl.where(wide == 1.0, 1.0, wide - 1.0)) + tl.where(wide == 1.0, x, 0.0)


@triton.jit
def invert_unit_lower(lower, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular [BT, BT] float32 matrix.

    The diagonal blocks of 16 are inverted by substitution, all at once: D. What is left of the matrix is
    D^-1 (I + M) with M = D (lower - its diagonal blocks) strictly lower in blocks of 16, hence M^4 = 0 and
    (I + M)^-1 = (I + M^2)(I - M). Powers of `lower` itself are never taken: similar keys make them overflow.
    """
    B: tl.constexpr = BT // 16
    tl.static_assert(BT <= 64)
    i = tl.arange(0, BT) // 16
    same = (tl.arange(0, B)[:, None, None, None] == tl.arange(0, B)[None, None, :, None]) & (
        tl.full([1, 16, 1, 16], 1, tl.int1)
    )
    block = tl.sum(tl.where(same, tl.reshape(lower, [B, 16, B, 16]), 0.0), axis=2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros([B, 16, 16], tl.float32)
    for step in tl.static_range(15):
        factor = tl.sum(tl.where(column == step, block, 0.0), axis=2)
        known = tl.sum(tl.where(row == step, inverse, 0.0), axis=1)
        inverse -= factor[:, :, None] * known[:, None, :]
    diagonal = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [BT, BT])
    rest = tl.where(i[:, None] > i[None, :], lower, 0.0)
    m = tl.dot(diagonal, rest, input_precision=PRECISION)
    y = diagonal - tl.dot(m, diagonal, input_precision=PRECISION)
    m2 = tl.dot(m, m, input_precision=PRECISION)
    return y + tl.dot(m2, y, input_precision=PRECISION)


@triton.jit
def prepare_kernel(
    q,
    k,
    g,
    beta,
    decay_log,
    decay_bias,
    cu_seqlens,
    out,
    solve,  # [HV, T, BT]
    scores,  # [HV, T, BT]
    since,  # [HV, T]
    until,  # [HV, T]
    num_seqs,
    total,
    q_t,
    q_h,
    q_k,
    k_t,
    k_h,
    k_k,
    g_t,
    g_h,
    beta_t,
    beta_h,
    o_t,
    o_h,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATED: tl.constexpr,
    WITH_OUTPUT: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE_PRECISION: tl.constexpr,
):
    """One chunk of one value head.

    With GATED, g and beta are the projections a and b of the gates (see `kernels.gdn_gating`), `decay_log` is A_log
    and `decay_bias` dt_bias.
    """
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if WITH_OUTPUT:
        clear_outside(out + head * o_h, o_t, o_v, cu_seqlens, num_seqs, chunk, total, V, BT, BV)
    sequence = find_sequence(cu_seqlens, num_seqs, chunk, BT)
    if sequence < 0:
        return
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    first = begin + (chunk - (begin.to(tl.int32) // BT + sequence)).to(tl.int64) * BT
    if first >= end:
        return
    row = tl.arange(0, BT)
    live = first + row < end
    decay = tl.load(g + first * g_t + head * g_h + row * g_t, mask=live, other=0.0).to(tl.float32)
    strength = tl.load(beta + first * beta_t + head * beta_h + row * beta_t, mask=live, other=0.0).to(tl.float32)
    if GATED:
        x = decay + tl.load(decay_bias + head).to(tl.float32)
        decay = -tl.exp(tl.load(decay_log + head).to(tl.float32)) * softplus(x)
        decay = tl.where(live, decay, 0.0)
        strength = tl.where(live, tl.sigmoid(strength), 0.0)

    # One strongly decaying token makes b large; a second float keeps the small differences between its neighbours.
    wide = tl.maximum(decay, LOG_ZERO).to(tl.float64)
    b = tl.cumsum(wide, axis=0)
    high = b.to(tl.float32)
    low = (b - high.to(tl.float64)).to(tl.float32)
    at = head * total + first
    tl.store(since + at + row, tl.exp(high), mask=live)
    tl.store(until + at + row, tl.exp((tl.sum(wide, axis=0) - b).to(tl.float32)), mask=live)
    later = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    pair = tl.exp(tl.minimum(later, 0.0))

    column = tl.arange(0, BK)
    mask = live[:, None] & (column < K)[None, :]
    key_head = head // GROUP
    keys = tl.load(k + first * k_t + key_head * k_h + row[:, None] * k_t + column[None, :] * k_k, mask=mask, other=0.0)
    place = at * BT + row[:, None] * BT + row[None, :]
    if WITH_OUTPUT:
        query = q + first * q_t + key_head * q_h + row[:, None] * q_t + column[None, :] * q_k
        read = tl.dot(tl.load(query, mask=mask, other=0.0), tl.trans(keys), input_precision=PRECISION) * pair
        read = tl.where(row[:, None] >= row[None, :], read, 0.0)
        tl.store(scores + place, read.to(scores.dtype.element_ty), mask=live[:, None])
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * pair * strength[:, None]
    lower = tl.where(row[:, None] > row[None, :], lower, 0.0)
    inverse = invert_unit_lower(lower, BT, MERGE_PRECISION) * strength[None, :]
    tl.store(solve + place, inverse.to(solve.dtype.element_ty), mask=live[:, None])


@triton.jit
def scan_kernel(
    q,
    k,
    v,
    solve,  # [HV, T, BT]
    scores,  # [HV, T, BT]
    since,  # [HV, T]
    until,  # [HV, T]
    out,
    initial,
    final,
    maps,
    slots,
    resumed,
    cu_seqlens,
    scale,
    null_slot,
    total,
    heads,
    q_t,
    q_h,
    q_k,
    k_t,
    k_h,
    k_k,
    v_t,
    v_h,
    v_v,
    o_t,
    o_h,
    o_v,
    i_n,
    i_h,
    i_v,
    i_k,
    f_n,
    f_h,
    f_v,
    f_k,
    m_n,
    m_h,
    m_v,
    m_k,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WITH_INITIAL: tl.constexpr,
    WITH_RESUMED: tl.constexpr,
    WITH_OUTPUT: tl.constexpr,
    WITH_SLOTS: tl.constexpr,
    POOLED: tl.constexpr,
    WITH_NULL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One sequence, one value head, BV columns of the transposed state.

    Blocks behind the last one of V, if the grid has any, run the state's own map: they start from rows of the
    identity, are written nothing (v = 0), and end as rows of E in S_end = N + S_0 E, stored to `maps`.
    With POOLED, initial and final states are the sequence's slot of one pool, of which padding sequences have none;
    without, a padding sequence counts as one without rows.
    """
    block = tl.program_id(0)
    pid = tl.program_id(1)
    sequence, head = pid // heads, (pid % heads).to(tl.int64)
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens + sequence + 1).to(tl.int64) - begin).to(tl.int32)
    v_blocks: tl.constexpr = (V + BV - 1) // BV
    is_map = block >= v_blocks
    column = tl.where(is_map, block - v_blocks, block) * BV + tl.arange(0, BV)
    columns = tl.where(is_map, K, V)
    row = tl.arange(0, BT)
    key = tl.arange(0, BK)
    live_key = key < K
    live_column = column < columns

    state_row = sequence.to(tl.int64)
    real = True
    if WITH_SLOTS:
        slot = tl.load(slots + sequence).to(tl.int64)
        real = slot >= 0
        if WITH_NULL:
            real = real & (slot != null_slot)
        if not POOLED:
            length = tl.where(real, length, 0)
    if WITH_OUTPUT:
        out += head * o_h
    if POOLED:
        if length == 0:
            return
        if not real:
            if WITH_OUTPUT:
                for at in range(0, length, BT):
                    mask = (at + row < length)[:, None] & live_column[None, :]
                    blank = out + (begin + at) * o_t + row[:, None] * o_t + column[None, :] * o_v
                    tl.store(blank, tl.zeros([BT, BV], out.dtype.element_ty), mask=mask)
            return
        state_row = slot

    key_head = head // GROUP
    k += key_head * k_h
    v += head * v_h
    solve += head * total * BT
    since += head * total + begin
    until += head * total + begin
    if WITH_OUTPUT:
        q += key_head * q_h
        scores += head * total * BT

    inside = live_key[:, None] & live_column[None, :]
    state = tl.where(is_map & (key[:, None] == column[None, :]), 1.0, 0.0)
    if WITH_INITIAL:
        take = inside & (block < v_blocks)
        if WITH_RESUMED:
            take = take & (tl.load(resumed + sequence) != 0)
        start = initial + state_row * i_n + head * i_h + key[:, None] * i_k + column[None, :] * i_v
        state += tl.load(start, mask=take, other=0.0).to(tl.float32)

    # What no product takes directly is fetched one chunk ahead.
    since_start = tl.load(since + row, mask=row < length, other=0.0)
    until_end = tl.load(until + row, mask=row < length, other=0.0)
    decay = tl.load(since + tl.minimum(BT, length) - 1, mask=length > 0, other=1.0)
    for at in tl.range(0, length, BT, num_stages=STAGES):  # type: ignore[misc]
        live = at + row < length
        far = begin + at
        row_key = live[:, None] & live_key[None, :]
        keys = tl.load(k + far * k_t + row[:, None] * k_t + key[None, :] * k_k, mask=row_key, other=0.0)
        solver = tl.load(solve + far * BT + row[:, None] * BT + row[None, :], mask=live[:, None], other=0.0)
        row_column = live[:, None] & (live_column & (block < v_blocks))[None, :]
        value = tl.load(v + far * v_t + row[:, None] * v_t + column[None, :] * v_v, mask=row_column, other=0.0)
        next_row = at + BT + row
        next_since = tl.load(since + next_row, mask=next_row < length, other=0.0)
        next_until = tl.load(until + next_row, mask=next_row < length, other=0.0)
        next_decay = tl.load(since + tl.minimum(at + 2 * BT, length) - 1)

        seen = state.to(keys.dtype)
        error = value.to(tl.float32) - since_start[:, None] * tl.dot(keys, seen, input_precision=PRECISION)
        write = tl.dot(solver, error.to(keys.dtype), input_precision=PRECISION)
        if WITH_OUTPUT:
            query = tl.load(q + far * q_t + row[:, None] * q_t + key[None, :] * q_k, mask=row_key, other=0.0)
            score = tl.load(scores + far * BT + row[:, None] * BT + row[None, :], mask=live[:, None], other=0.0)
            read = since_start[:, None] * tl.dot(query, seen, input_precision=PRECISION)
            read = tl.dot(score, write.to(keys.dtype), read, input_precision=PRECISION) * scale
            answer = out + far * o_t + row[:, None] * o_t + column[None, :] * o_v
            tl.store(answer, read.to(out.dtype.element_ty), mask=live[:, None] & live_column[None, :])
        kept = (write * until_end[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), kept, state * decay, input_precision=PRECISION)
        since_start, until_end, decay = next_since, next_until, next_decay

    if is_map:
        place = maps + sequence.to(tl.int64) * m_n + head * m_h + key[:, None] * m_k + column[None, :] * m_v
        tl.store(place, state.to(maps.dtype.element_ty), mask=inside)
    else:
        place = final + state_row * f_n + head * f_h + key[:, None] * f_k + column[None, :] * f_v
        tl.store(place, state.to(final.dtype.element_ty), mask=inside)
