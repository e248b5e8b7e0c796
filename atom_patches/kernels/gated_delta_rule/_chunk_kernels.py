"""Triton kernels of the chunked gated delta rule: what a chunk is before its state is known, and the scan.

With the notation of `chunk_reference`, D = diag(beta) and A = (I + L)^-1 D, a chunk that starts from S0 errs by

    e = v - e^b S0 k            (one row a token)

and its writes are A e. Hence the state at its end, and what its queries read, with d the decay until its end:

    S1 = e^{b_end} S0 + e^T (A^T d k)            o = scale (e^b q S0^T + (P A) e),  P_ts = e^{b_t - b_s} (q_t . k_s)

`prepare_kernel` computes, for every chunk at once, "writes" A^T d k, "scores" P A, and the decays since the chunk's
start. `scan_kernel` walks one sequence, one head and one block of value columns from chunk to chunk, with the
transposed state [K, BV] in registers: from state to state it takes two products that wait for each other. It writes
the outputs as it goes, so that neither the chunks' states nor their writes go through memory.

Chunks are numbered without counting them: chunk j of sequence i has number cu[i] // BT + i + j. Since a sequence
of n rows from row a has at most (a + n) // BT - a // BT + 1 chunks, numbers never meet, and T // BT + N bounds
them. Numbers that no chunk has belong to programs that return at once.
"""

from __future__ import annotations

import triton.language as tl

from atom_patches.kernels.assembler import jit

#: exp() of anything below -104 is exactly 0 in float32: the bound changes no result, and keeps -inf out of b_t - b_s.
LOG_ZERO = tl.constexpr(-200.0)
#: The same for half precision, where e^-30 is nothing beside what it is added to, and sums of 64 stay exact to 1e-4.
HALF_ZERO = tl.constexpr(-30.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def find_sequence(cu_seqlens, num_seqs, chunk, SINGLE: tl.constexpr, BT: tl.constexpr):
    """The sequence that the chunk number falls to, -1 if it lies before the first. SINGLE: there is one sequence."""
    if SINGLE:
        return tl.where(chunk < tl.load(cu_seqlens).to(tl.int32) // BT, -1, 0)
    found = 0
    for base in range(0, num_seqs, 128):
        i = base + tl.arange(0, 128)
        first = tl.load(cu_seqlens + i, mask=i < num_seqs, other=0).to(tl.int32) // BT + i
        found += tl.sum(((first <= chunk) & (i < num_seqs)).to(tl.int32), axis=0)
    return found - 1


@jit
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


@jit
def softplus(x):
    """log(1 + e^x); for large x it is x."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@jit
def log1p(x):
    """log(1 + x) for 0 <= x <= 1, exact to a few units in the last place also for tiny x."""
    wide = 1.0 + x
    return tl.log(wide) * (x / tl.where(wide == 1.0, 1.0, wide - 1.0)) + tl.where(wide == 1.0, x, 0.0)


@jit
def join_blocks(inverse, block, SIZE: tl.constexpr, kind: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of the diagonal blocks of 2 SIZE from those of SIZE, within [B, 16, 16]."""
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    below = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE > column // SIZE)
    known = inverse.to(kind)
    corner = tl.dot(known, tl.where(below, block, 0.0).to(kind), input_precision=PRECISION)
    return inverse - tl.dot(corner.to(kind), known, input_precision=PRECISION)


@jit
def invert_unit_lower(lower, BT: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr):
    """(I + lower)^-1 for a [BT, BT] float32 matrix of which only what lies below the diagonal counts.

    First the inverses of the diagonal blocks of 16, all at once, joined from those of 2, 4 and 8: if the block is
    [[A, 0], [C, B]], its inverse is diag(A^-1, B^-1) minus the product of that, C and that. With D the diagonal matrix
    of these inverses, what is left is D^-1 (I + M) with M = D (lower - its diagonal blocks) strictly lower in blocks of
    16, hence M^4 = 0 and (I + M)^-1 = (I + M^2)(I - M). Powers of `lower` itself are never taken: similar keys make
    them overflow. With HALF products take float16 operands, as fine as TF32, and safe: with keys of unit length at most
    every entry of every inverse is at most 1.
    """
    B: tl.constexpr = BT // 16
    tl.static_assert(BT <= 64)
    kind: tl.constexpr = tl.float16 if HALF else tl.float32  # type: ignore[assignment]
    same = (tl.arange(0, B)[:, None, None, None] == tl.arange(0, B)[None, None, :, None]) & (
        tl.full([1, 16, 1, 16], 1, tl.int1)
    )
    block = tl.sum(tl.where(same, tl.reshape(lower, [B, 16, B, 16]), 0.0), axis=2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    block = tl.where(row > column, block, 0.0)
    inverse = tl.where(row == column, 1.0, 0.0)
    inverse -= tl.where(row // 2 == column // 2, block, 0.0)
    inverse = join_blocks(inverse, block, 2, kind, PRECISION)
    inverse = join_blocks(inverse, block, 4, kind, PRECISION)
    inverse = join_blocks(inverse, block, 8, kind, PRECISION)
    diagonal = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [BT, BT])
    i = tl.arange(0, BT)
    rest = tl.where(i[:, None] // 16 > i[None, :] // 16, lower, 0.0)
    d = diagonal.to(kind)
    m = tl.dot(d, rest.to(kind), input_precision=PRECISION).to(kind)
    y = diagonal - tl.dot(m, d, input_precision=PRECISION)
    m2 = tl.dot(m, m, input_precision=PRECISION)
    return y + tl.dot(m2.to(kind), y.to(kind), input_precision=PRECISION)


@jit(do_not_specialize=["num_seqs", "total"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    decay_log,
    decay_bias,
    cu_seqlens,
    out,
    writes,  # [HV, T, K]
    scores,  # [HV, T, BT]
    since,  # [HV, T]
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
    PART: tl.constexpr,
    STASH: tl.constexpr,
    BV: tl.constexpr,
    SINGLE: tl.constexpr,
    GATED: tl.constexpr,
    HALF: tl.constexpr,
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
    sequence = find_sequence(cu_seqlens, num_seqs, chunk, SINGLE, BT)
    if sequence < 0:
        return
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    first = begin + (chunk - (begin.to(tl.int32) // BT + sequence)).to(tl.int64) * BT
    if first >= end:
        return
    row = tl.arange(0, BT)
    live = row < tl.minimum(end - first, BT).to(tl.int32)
    decay = tl.load(g + first * g_t + head * g_h + row * g_t, mask=live, other=0.0).to(tl.float32)
    strength = tl.load(beta + first * beta_t + head * beta_h + row * beta_t, mask=live, other=0.0).to(tl.float32)
    if GATED:
        x = decay + tl.load(decay_bias + head).to(tl.float32)
        decay = -tl.exp(tl.load(decay_log + head).to(tl.float32)) * softplus(x)
        decay = tl.where(live, decay, 0.0)
        strength = tl.where(live, tl.sigmoid(strength), 0.0)

    at = head * total + first
    causal = row[:, None] >= row[None, :]
    if HALF:
        bits = tl.maximum(decay, HALF_ZERO) * LOG2_E
        sums = tl.cumsum(bits, axis=0)
        later = sums[:, None] - sums[None, :]
    else:
        # One strongly decaying token makes sums large; a second float keeps the small differences of its neighbours.
        bits = tl.maximum(decay, LOG_ZERO).to(tl.float64) * LOG2_E
        sums = tl.cumsum(bits, axis=0)
        high = sums.to(tl.float32)
        low = (sums - high.to(tl.float64)).to(tl.float32)
        later = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    left = tl.exp2((tl.sum(bits, axis=0) - sums).to(tl.float32))
    tl.store(since + at + row, tl.exp2(sums.to(tl.float32)), mask=live)
    pair = tl.exp2(tl.where(causal, later, -float("inf")))

    kind: tl.constexpr = k.dtype.element_ty
    column = tl.arange(0, BK)
    mask = live[:, None] & (column < K)[None, :]
    key_head = head // GROUP
    k += first * k_t + key_head * k_h
    square = row[:, None] * BT + row[None, :]
    scores += at * BT
    keys = tl.load(k + row[:, None] * k_t + column[None, :] * k_k, mask=mask, other=0.0)
    read = keys
    if WITH_OUTPUT:
        q += first * q_t + key_head * q_h
        query = tl.load(q + row[:, None] * q_t + column[None, :] * q_k, mask=mask, other=0.0)
        read = (tl.dot(query, tl.trans(keys), input_precision=PRECISION) * pair).to(kind)
        if STASH:
            tl.store(scores + square, read, mask=live[:, None])
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * pair * strength[:, None]
    inverse = invert_unit_lower(lower, BT, MERGE_PRECISION, HALF) * strength[None, :]
    if WITH_OUTPUT:
        if STASH:
            # What lay in memory meanwhile, that is in the cache, took no registers.
            tl.debug_barrier()
            read = tl.load(scores + square, mask=live[:, None], other=0.0)
            tl.debug_barrier()
        read = tl.dot(read, inverse.to(kind), input_precision=PRECISION).to(kind)
        tl.store(scores + square, read, mask=live[:, None])
    kept = tl.trans((inverse * left[:, None]).to(kind))
    part_column = tl.arange(0, PART)
    for done in tl.static_range(0, K, PART):
        mask = live[:, None] & (done + part_column < K)[None, :]
        part = tl.load(k + row[:, None] * k_t + (done + part_column)[None, :] * k_k, mask=mask, other=0.0)
        part = tl.dot(kept, part, input_precision=PRECISION).to(kind)
        tl.store(writes + (at * K + done) + row[:, None] * K + part_column[None, :], part, mask=mask)


@jit(do_not_specialize=["total", "null_slot", "scans"])
def scan_kernel(
    q,
    k,
    v,
    writes,  # [HV, T, K]
    scores,  # [HV, T, BT]
    since,  # [HV, T]
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
    scans,
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
    BLOCKS: tl.constexpr,
    GAP: tl.constexpr,
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
    turn = tl.program_id(0) // GAP
    block, scan = turn % BLOCKS, turn // BLOCKS * GAP + tl.program_id(0) % GAP
    if scan >= scans:
        return
    sequence, head = scan // heads, (scan % heads).to(tl.int64)
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
    writes += head * total * K
    since += head * total + begin
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

    # Every load below feeds a product, and is therefore fetched chunks ahead. A plain one would be waited for at the
    # next fence between writing shared memory and multiplying from it.
    same = tl.zeros([BV], tl.int32)
    for at in tl.range(0, length, BT, num_stages=STAGES):  # type: ignore[misc]
        live = at + row < length
        far = begin + at
        row_key = live[:, None] & live_key[None, :]
        keys = tl.load(k + far * k_t + row[:, None] * k_t + key[None, :] * k_k, mask=row_key, other=0.0)
        writer = tl.load(writes + far * K + row[:, None] * K + key[None, :], mask=row_key, other=0.0)
        row_column = live[:, None] & (live_column & (block < v_blocks))[None, :]
        value = tl.load(v + far * v_t + row[:, None] * v_t + column[None, :] * v_v, mask=row_column, other=0.0)
        since_start = tl.load(since + at + row, mask=live, other=0.0)
        decay = tl.load(since + (tl.minimum(at + BT, length) - 1 + same))

        seen = state.to(keys.dtype)
        error = value.to(tl.float32) - since_start[:, None] * tl.dot(keys, seen, input_precision=PRECISION)
        error = error.to(keys.dtype)
        state = tl.dot(tl.trans(writer), error, state * decay[None, :], input_precision=PRECISION)
        if WITH_OUTPUT:
            query = tl.load(q + far * q_t + row[:, None] * q_t + key[None, :] * q_k, mask=row_key, other=0.0)
            score = tl.load(scores + far * BT + row[:, None] * BT + row[None, :], mask=live[:, None], other=0.0)
            read = since_start[:, None] * tl.dot(query, seen, input_precision=PRECISION)
            read = tl.dot(score, error, read, input_precision=PRECISION) * scale
            answer = out + far * o_t + row[:, None] * o_t + column[None, :] * o_v
            tl.store(answer, read.to(out.dtype.element_ty), mask=live[:, None] & live_column[None, :])

    if is_map:
        place = maps + sequence.to(tl.int64) * m_n + head * m_h + key[:, None] * m_k + column[None, :] * m_v
        tl.store(place, state.to(maps.dtype.element_ty), mask=inside)
    else:
        place = final + state_row * f_n + head * f_h + key[:, None] * f_k + column[None, :] * f_v
        tl.store(place, state.to(final.dtype.element_ty), mask=inside)
