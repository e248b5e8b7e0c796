"""Triton kernels of absorbed latent attention.

A program holds a block of query rows and walks over its keys; the latent part of a key, loaded once, serves the
scores and the values. A split is a part of the keys whose result is merged later.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# (types that exist only while Triton compiles)
from __future__ import annotations

import triton.language as tl

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.e4m3_triton import encode_e4m3

PLAIN = tl.constexpr(0)
SCALED = tl.constexpr(1)
PACKED = tl.constexpr(2)
GROUP = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@jit
def _load_query(q, at, mine, L: tl.constexpr, R: tl.constexpr):
    """The latent part and the rope part of the rows at `at`."""
    latent = tl.load(q + at[:, None] + tl.arange(0, L)[None, :], mask=mine[:, None], other=0.0)
    return latent, tl.load(q + at[:, None] + L + tl.arange(0, R)[None, :], mask=mine[:, None], other=0.0)


@jit
def _load_keys(
    latent, scales, rope, latent_at, scales_at, rope_at, inside, dtype: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """The latent part and the rope part of the tokens whose parts lie at the given offsets, 0 where not inside.

    What is packed is multiplied by its scale here: one product of a whole row keeps the matrix unit busier than one of
    each group.
    """
    keys: tl.constexpr = latent_at.shape[0]
    narrow = tl.load(rope + rope_at[:, None] + tl.arange(0, R)[None, :], mask=inside[:, None], other=0)
    if LAYOUT == SCALED:
        narrow = narrow.to(tl.float8e4nv, bitcast=True).to(tl.float32)  # straight to bfloat16 needs 9.0
    if LAYOUT == PACKED:
        group = tl.arange(0, L // GROUP)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        wide = tl.load(latent + latent_at[:, None, None] + column[None], mask=inside[:, None, None], other=0)
        scale = tl.load(scales + scales_at[:, None] + group[None, :], mask=inside[:, None], other=0.0)
        wide = wide.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]
        wide = wide.to(dtype).reshape(keys, L)
    else:
        wide = tl.load(latent + latent_at[:, None] + tl.arange(0, L)[None, :], mask=inside[:, None], other=0)
        if LAYOUT == SCALED:
            wide = wide.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        wide = wide.to(dtype)
    return wide, narrow.to(dtype)


@jit
def _nothing_yet(ROWS: tl.constexpr, L: tl.constexpr):
    """The running softmax before the first key: sums of exp2(score - top) * latent, of exp2(score - top), and top."""
    state = tl.zeros((ROWS, L), tl.float32)
    return state, tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)


@jit
def _take_in(state, total, top, q_latent, q_rope, wide, narrow, visible, factor):
    """One step of the running softmax."""
    scores = tl.dot(q_rope, tl.trans(narrow), input_precision="ieee")
    scores = tl.dot(q_latent, tl.trans(wide), scores, input_precision="ieee")
    scores = tl.where(visible, scores * factor, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    state = tl.dot(weights.to(wide.dtype), wide, state * fade[:, None], input_precision="ieee")
    return state, total, higher


@jit
def _store(state, total, top, value_factor, out, lse, place, mine, written, L: tl.constexpr):
    """The rows' results, where written, and their natural log-sum-exp."""
    some = total > 0.0
    log_sum = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse + place, log_sum, mask=mine)
    norm = value_factor / tl.where(some, total, 1.0)
    at = place[:, None] * L + tl.arange(0, L)[None, :]
    tl.store(out + at, (state * norm[:, None]).to(out.dtype.element_ty), mask=(mine & written)[:, None])


@jit(do_not_specialize=["tokens", "sequences", "table_row"])
def dense(
    q, latent, scales, rope, cache_scale, block_table, cu_seqlens, lengths, out, lse,
    tokens, sequences, heads, scale, q_token, q_head, table_row, table_column,
    latent_block, latent_place, scales_block, scales_place, rope_block, rope_place,
    L: tl.constexpr, R: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head) pairs, head fastest; block b of the grid is found in the sequence whose blocks, counted
    from cu_seqlens * heads // ROWS + its number, hold it. The rows after the last sequence are one without keys."""
    rows = tokens * heads
    here = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    before = 0
    for first in range(0, sequences + 1, 128):
        number = first + tl.arange(0, 128)
        listed = number <= sequences
        begin = tl.load(cu_seqlens + number, mask=listed, other=0).to(tl.int64) * heads // ROWS + number
        before += tl.sum((listed & (begin <= here)).to(tl.int32))
    sequence = before - 1
    token_begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    real = sequence < sequences
    token_end = tl.load(cu_seqlens + sequence + 1, mask=real, other=0).to(tl.int64)
    row_begin = token_begin * heads
    row_end = tl.where(real, token_end * heads, rows)
    block_begin = row_begin + (here - (row_begin // ROWS + sequence)) * ROWS
    if block_begin >= row_end:
        return
    length = tl.load(lengths + sequence, mask=real, other=0)
    row = block_begin + tl.arange(0, ROWS)
    mine = row < row_end
    if ALIGNED:  # the heads of one token, which then stays out of the vectors
        token = block_begin // heads
        q_at = token * q_token + ((block_begin % heads).to(tl.int32) + tl.arange(0, ROWS)) * q_head
        seen = length - (token_end - token).to(tl.int32) + 1 + tl.zeros((ROWS,), tl.int32)
    else:
        token = row // heads
        q_at = token * q_token + (row % heads) * q_head
        seen = length - (token_end - token).to(tl.int32) + 1
    last_token = (tl.minimum(block_begin + ROWS, row_end) - 1) // heads
    end = length - (token_end - last_token).to(tl.int32) + 1
    end = tl.where(real, tl.maximum(end, 0), 0)
    part = tl.cdiv(tl.cdiv(end, KEYS), splits) * KEYS
    begin = split * part
    end = tl.minimum(begin + part, end)

    factor = scale * LOG2E
    value_factor = 1.0
    if LAYOUT == SCALED:
        value_factor = tl.load(cache_scale)
        factor = factor * value_factor
    q_latent, q_rope = _load_query(q, q_at, mine, L, R)
    state, total, top = _nothing_yet(ROWS, L)
    table = block_table + sequence.to(tl.int64) * table_row
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        position = first + tl.arange(0, KEYS)
        inside = position < end
        if PAGE % KEYS == 0:  # all of them in one block, whose number then stays out of the vectors
            block = tl.load(table + (first // PAGE) * table_column).to(tl.int64)
            place = first % PAGE + tl.arange(0, KEYS)
            latents = latent + block * latent_block
            factors = scales + block * scales_block if LAYOUT == PACKED else scales
            ropes = rope + block * rope_block
            latents_at = place * latent_place
            factors_at = place * scales_place
            ropes_at = place * rope_place
        else:
            block = tl.load(table + (position // PAGE) * table_column, mask=inside, other=0).to(tl.int64)
            place = position % PAGE
            latents = latent
            factors = scales
            ropes = rope
            latents_at = block * latent_block + place * latent_place
            factors_at = block * scales_block + place * scales_place
            ropes_at = block * rope_block + place * rope_place
        wide, narrow = _load_keys(
            latents, factors, ropes, latents_at, factors_at, ropes_at, inside, q_rope.dtype, L, R, LAYOUT
        )
        visible = position[None, :] < tl.minimum(seen, end)[:, None]
        state, total, top = _take_in(state, total, top, q_latent, q_rope, wide, narrow, visible, factor)
    place = split * rows + row
    written = (splits == 1) | (begin < end)
    _store(state, total, top, value_factor, out, lse, place, mine, written, L)


@jit(do_not_specialize=["tokens"])
def sparse(
    q, latent, scales, rope, cache_scale, indices, out, lse,
    tokens, top_k, heads, scale, q_token, q_head, indices_row, indices_column,
    latent_block, latent_place, scales_block, scales_place, rope_block, rope_place,
    L: tl.constexpr, R: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr, TOP_K2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token, a block of its heads, a part of its slots up to the last one in use."""
    blocks = tl.cdiv(heads, ROWS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    mine = head < heads
    line = indices + token * indices_row
    every = tl.arange(0, TOP_K2)
    filled = tl.load(line + every * indices_column, mask=every < top_k, other=-1) >= 0
    end = tl.max(tl.where(filled, every + 1, 0))
    part = tl.cdiv(tl.cdiv(end, KEYS), splits) * KEYS
    begin = split * part
    end = tl.minimum(begin + part, end)

    factor = scale * LOG2E
    value_factor = 1.0
    if LAYOUT == SCALED:
        value_factor = tl.load(cache_scale)
        factor = factor * value_factor
    q_at = token * q_token + head * q_head
    q_latent, q_rope = _load_query(q, q_at, mine, L, R)
    state, total, top = _nothing_yet(ROWS, L)
    number = begin + tl.arange(0, KEYS)
    slot = tl.load(line + number * indices_column, mask=number < end, other=-1)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        number = first + KEYS + tl.arange(0, KEYS)
        following = tl.load(line + number * indices_column, mask=number < end, other=-1)
        used = slot >= 0
        slot = tl.where(used, slot, 0).to(tl.int64)
        block = slot // PAGE
        at = slot % PAGE
        wide, narrow = _load_keys(
            latent, scales, rope, block * latent_block + at * latent_place, block * scales_block + at * scales_place,
            block * rope_block + at * rope_place, used, q_rope.dtype, L, R, LAYOUT,
        )  # fmt: skip
        state, total, top = _take_in(state, total, top, q_latent, q_rope, wide, narrow, used[None, :], factor)
        slot = following
    place = (split * tokens + token) * heads + head
    written = (splits == 1) | (begin < end)
    _store(state, total, top, value_factor, out, lse, place, mine, written, L)


@jit(do_not_specialize=["rows"])
def merge(parts, part_lse, out, lse, rows, L: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the splits of one row, WIDTH of its values: weights exp(lse of the part - lse of all). Parts without
    keys were never written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, SPLITS)
    log_sum = tl.load(part_lse + split * rows + row)
    top = tl.max(log_sum)
    weight = tl.exp(log_sum - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight)
    at = (split * rows + row)[:, None] * L + column[None, :]
    inside = (weight > 0.0)[:, None] & (column < L)[None, :]
    part = tl.load(parts + at, mask=inside, other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * L + column, result.to(out.dtype.element_ty), mask=column < L)
    if tl.program_id(1) == 0:
        some = total > 0.0
        tl.store(lse + row, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")))


@jit
def write(
    latent, rope, slots, cache_latent, cache_scales, cache_rope, cache_scale, latent_row, rope_row, slots_stride,
    latent_block, latent_place, scales_block, scales_place, rope_block, rope_place,
    latent_size, rope_size, LAYOUT: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One token; its latent as GROUPS (a power of two) rows of 128."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slots_stride).to(tl.int64)
    if slot < 0:
        return
    block = slot // PAGE
    place = slot % PAGE
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < latent_size
    narrow_column = tl.arange(0, R)
    narrow_inside = narrow_column < rope_size
    wide = tl.load(latent + token * latent_row + column, mask=inside, other=0.0).to(tl.float32)
    narrow = tl.load(rope + token * rope_row + narrow_column, mask=narrow_inside, other=0.0).to(tl.float32)
    to_latent = cache_latent + block * latent_block + place * latent_place
    to_rope = cache_rope + block * rope_block + place * rope_place
    if LAYOUT == PLAIN:
        tl.store(to_latent + column, wide.to(cache_latent.dtype.element_ty), mask=inside)
        tl.store(to_rope + narrow_column, narrow.to(cache_rope.dtype.element_ty), mask=narrow_inside)
    elif LAYOUT == SCALED:
        scale = tl.load(cache_scale)
        tl.store(to_latent + column, encode_e4m3(tl.div_rn(wide, scale + tl.zeros_like(wide))), mask=inside)
        divided = tl.div_rn(narrow, scale + tl.zeros_like(narrow))
        tl.store(to_rope + narrow_column, encode_e4m3(divided), mask=narrow_inside)
    else:
        largest = tl.max(tl.abs(wide), 1)
        scale = tl.maximum(tl.div_rn(largest, tl.full((GROUPS,), 448.0, tl.float32)), 1.1754943508222875e-38)
        divided = tl.div_rn(wide, tl.broadcast_to(scale[:, None], (GROUPS, GROUP)))
        tl.store(to_latent + column, encode_e4m3(divided), mask=inside)
        group = tl.arange(0, GROUPS)
        to_scales = cache_scales + block * scales_block + place * scales_place
        tl.store(to_scales + group, scale, mask=group * GROUP < latent_size)
        tl.store(to_rope + narrow_column, narrow.to(tl.bfloat16), mask=narrow_inside)
