"""The paged attention kernel: rows of one sequence, the query heads of one key head, a range of keys."""

from __future__ import annotations

import triton.language as tl

from atom_patches.kernels.assembler import jit

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@jit(do_not_specialize=["num_rows", "num_seqs", "num_tiles", "lse_split", "lse_head", "table_seq"])
def attention_kernel(
    out, lse, q, key_cache, value_cache, block_table, cu_seqlens_q, seq_lens_k, query_positions, k_scale, v_scale,
    num_rows, num_seqs, num_tiles, scale, window, soft_cap, shortest,
    out_split, out_row, out_head, lse_split, lse_row, lse_head,
    q_row, q_head, q_dim, k_block, k_slot, k_head, k_dim, v_block, v_slot, v_head, v_dim, table_seq, table_block,
    cu_stride, lens_stride, position_stride, k_scale_head, v_scale_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr, POSITIONS: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, SPLIT: tl.constexpr, BY_SEQUENCE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Late rows of a sequence see the most keys: they start first.
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    if BY_SEQUENCE:
        sequence = tl.minimum(tile, num_seqs)
        tile -= sequence
    else:
        sequence = _sequence_of(tile, cu_seqlens_q, cu_stride, num_seqs, BLOCK_Q)
        tile -= _first_tile(sequence, cu_seqlens_q, cu_stride, BLOCK_Q)
    # The rows behind the last sequence count as one more, without keys.
    is_sequence = sequence < num_seqs
    start = tl.load(cu_seqlens_q + sequence * cu_stride).to(tl.int32)
    end = tl.load(cu_seqlens_q + (sequence + 1) * cu_stride, mask=is_sequence, other=num_rows).to(tl.int32)
    keys = tl.load(seq_lens_k + sequence * lens_stride, mask=is_sequence, other=0).to(tl.int32)
    if start + tile * BLOCK_Q >= end:
        return

    lane = tl.arange(0, BLOCK_M)
    row = tile * BLOCK_Q + lane // GROUP
    real = (lane < BLOCK_Q * GROUP) & (start + row < end)
    token = (start + row).to(tl.int64)
    head = kv_head * GROUP + lane % GROUP
    dim = tl.arange(0, BLOCK_D)
    q_at = q + (token * q_row + head * q_head)[:, None] + dim[None, :] * q_dim
    queries = tl.load(q_at, mask=real[:, None] & (dim < HEAD)[None, :], other=0.0)

    # Row by row, the keys [row_begin, row_end) are visible.
    if POSITIONS:
        position = tl.load(query_positions + token * position_stride, mask=real, other=-1).to(tl.int32)
    else:
        position = keys - (end - start) + row
    row_end = tl.zeros([BLOCK_M], dtype=tl.int32) + keys
    row_begin = tl.zeros([BLOCK_M], dtype=tl.int32)
    if CAUSAL:
        row_end = tl.maximum(tl.minimum(position + 1, keys), 0)
    if WINDOWED:
        row_begin = tl.maximum(position - (window - 1), 0)
    row_end = tl.where(real, row_end, 0)

    # Some row sees keys of [low, high); every row sees those of [all_begin, all_end).
    high = tl.max(row_end, axis=0)
    all_end = tl.min(tl.where(real, row_end, high), axis=0)
    low = 0
    all_begin = 0
    if WINDOWED:
        low = tl.min(tl.where(row_begin < row_end, row_begin, high), axis=0)
        all_begin = tl.max(tl.where(real, row_begin, 0), axis=0)
    begin = low // BLOCK_N * BLOCK_N
    stop = high
    if SPLIT:
        # At least `shortest`, a multiple of BLOCK_N.
        share = tl.maximum(tl.cdiv(tl.cdiv(high - begin, tl.num_programs(1)), BLOCK_N) * BLOCK_N, shortest)
        begin += tl.program_id(1) * share
        stop = tl.minimum(begin + share, high)
    clear_begin = begin
    if WINDOWED:
        clear_begin = tl.maximum(begin, tl.cdiv(all_begin, BLOCK_N) * BLOCK_N)
    clear_end = tl.maximum(tl.minimum(stop, all_end // BLOCK_N * BLOCK_N), clear_begin)

    # Logits are kept as powers of two.
    if K_SCALED:
        scale *= tl.load(k_scale + kv_head * k_scale_head)
    if SOFT_CAP:
        inner = scale * (2.0 * LOG2_E) / soft_cap
        factor = soft_cap * LOG2_E
    else:
        inner = 1.0
        factor = scale * LOG2_E

    key_cache += kv_head * k_head
    value_cache += kv_head * v_head
    block_table += tl.cast(sequence, tl.int64) * table_seq
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    if WINDOWED:
        acc, total, peak = _walk(
            acc, total, peak, queries, begin, tl.minimum(clear_begin, stop), low, high, row_begin, row_end,
            key_cache, value_cache, block_table, inner, factor,
            k_block, k_slot, k_dim, v_block, v_slot, v_dim, table_block,
            BLOCK_N, HEAD, VALUE, BLOCK_D, BLOCK_V, PAGE, WINDOWED, SOFT_CAP, POSITIONS, PRECISION, MASKED=True,
        )  # fmt: skip
    acc, total, peak = _walk(
        acc, total, peak, queries, clear_begin, clear_end, low, high, row_begin, row_end,
        key_cache, value_cache, block_table, inner, factor,
        k_block, k_slot, k_dim, v_block, v_slot, v_dim, table_block,
        BLOCK_N, HEAD, VALUE, BLOCK_D, BLOCK_V, PAGE, WINDOWED, SOFT_CAP, POSITIONS, PRECISION, MASKED=False,
    )  # fmt: skip
    acc, total, peak = _walk(
        acc, total, peak, queries, clear_end, stop, low, high, row_begin, row_end,
        key_cache, value_cache, block_table, inner, factor,
        k_block, k_slot, k_dim, v_block, v_slot, v_dim, table_block,
        BLOCK_N, HEAD, VALUE, BLOCK_D, BLOCK_V, PAGE, WINDOWED, SOFT_CAP, POSITIONS, PRECISION, MASKED=True,
    )  # fmt: skip

    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    inverse = 1.0 / total
    if V_SCALED:
        inverse *= tl.load(v_scale + kv_head * v_scale_head)
    # A partial result without keys is told by its lse and not read: only whole results are written as zeros.
    written = real & seen if SPLIT else real
    split = tl.program_id(1).to(tl.int64)
    lse_at = lse + split * lse_split + token * lse_row + head * lse_head
    tl.store(lse_at, tl.where(seen, (peak + tl.log2(total)) * LN_2, float("-inf")), mask=real)
    value_dim = tl.arange(0, BLOCK_V)
    out_at = out + split * out_split + (token * out_row + head * out_head)[:, None] + value_dim[None, :]
    inside = written[:, None] & (value_dim < VALUE)[None, :]
    tl.store(out_at, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=inside)


@jit
def _walk(
    acc, total, peak, queries, begin, stop, low, high, row_begin, row_end,
    key_cache, value_cache, block_table, inner, factor,
    k_block, k_slot, k_dim, v_block, v_slot, v_dim, table_block,
    BLOCK_N: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys [begin, stop) into the running softmax; without MASKED every row sees all of them."""
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_V)
    # The pages of the next step are looked up one step ahead: the loads of keys and values then wait for nothing.
    next_page = _page_of(begin, high, block_table, table_block, PAGE, BLOCK_N)
    for first in range(begin, stop, BLOCK_N):
        page = next_page.to(tl.int64)
        next_page = _page_of(first + BLOCK_N, high, block_table, table_block, PAGE, BLOCK_N)
        key = first + tl.arange(0, BLOCK_N)
        needed = key >= 0
        visible = needed[None, :]
        if MASKED:
            visible = key[None, :] < row_end[:, None]
            if WINDOWED:
                visible &= key[None, :] >= row_begin[:, None]
            needed = (key >= low) & (key < high)
            if WINDOWED and POSITIONS:
                # Between the windows of rows that lie far apart the pages may be gone.
                needed &= tl.max(visible.to(tl.int32), axis=0) > 0
        slot = ((first % PAGE + tl.arange(0, BLOCK_N)) if PAGE % BLOCK_N == 0 else key % PAGE).to(tl.int64)
        k_at = key_cache + (page * k_block + slot * k_slot)[:, None] + dim[None, :] * k_dim
        v_at = value_cache + (page * v_block + slot * v_slot)[:, None] + value_dim[None, :] * v_dim
        k = _load(k_at, needed, dim, HEAD, BLOCK_D, MASKED).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP:
            scores = 1.0 - 2.0 / (tl.exp2(scores * inner) + 1.0)
        if MASKED:
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * factor)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        v = _load(v_at, needed, value_dim, VALUE, BLOCK_V, MASKED).to(queries.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


@jit
def _page_of(first, high, block_table, table_block, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each key from `first` on, below `high`; one number where the step lies within a page."""
    key = first if PAGE % BLOCK_N == 0 else first + tl.arange(0, BLOCK_N)
    return tl.load(block_table + (key // PAGE) * table_block, mask=key < high, other=0)


@jit
def _load(at, needed, dim, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a cache; those not needed, and columns behind SIZE, are 0 and not read."""
    if MASKED:
        rows = tl.load(at, mask=needed[:, None] & (dim < SIZE)[None, :], other=0.0)
    elif SIZE == BLOCK:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=(dim < SIZE)[None, :], other=0.0)
    return rows


@jit
def _first_tile(sequence, cu_seqlens_q, stride, BLOCK_Q: tl.constexpr):
    """Number of a sequence's first tile: these leave each sequence as many tiles as its rows fill, or one more."""
    return tl.load(cu_seqlens_q + sequence * stride).to(tl.int32) // BLOCK_Q + sequence


@jit
def _sequence_of(tile, cu_seqlens_q, stride, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence, or num_seqs for the rows behind them, that owns a tile: the last that starts no later."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if _first_tile(middle, cu_seqlens_q, stride, BLOCK_Q) <= tile:
            low = middle
        else:
            high = middle - 1
    return low
