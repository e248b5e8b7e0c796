"""Triton kernels of the sparse indexer: the key cache, the logits, and the step from positions to slots."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (types that exist only while Triton compiles)
from __future__ import annotations

import triton.language as tl

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.e4m3_triton import encode_e4m3, power_of_two_above


@jit
def queries(
    q, gates, cos, sin, out, weights, heads, half, factor, norm,
    q_token, q_head, gates_token, gates_head, cos_token, cos_pair, sin_token, sin_pair,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token. Hadamard's signs are the parities of the common bits of row and column."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = head < heads
    d = tl.arange(0, D)
    turned = d < 2 * half
    if INTERLEAVED:
        partner = d ^ 1
        pair = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < half, d + half, d - half)
        pair = tl.where(d < half, d, d - half)
        sign = tl.where(d < half, -1.0, 1.0)
    line = q + token * q_token + (head * q_head)[:, None]
    x = tl.load(line + d[None, :], mask=mine[:, None], other=0.0)
    other = tl.load(line + partner[None, :], mask=mine[:, None] & turned[None, :], other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_token + pair * cos_pair, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + pair * sin_pair, mask=turned, other=0.0).to(tl.float32)
    x = (x.to(tl.float32) * c[None, :] + other * (sign * s)[None, :]).to(x.dtype)
    common = d[:, None] & d[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    signs = (1 - 2 * ((common ^ (common >> 8)) & 1)).to(tl.float32)
    mixed = tl.dot(x, signs.to(x.dtype), input_precision="ieee") * norm
    largest = tl.maximum(tl.max(tl.abs(mixed), 1), 1e-4)
    scale = power_of_two_above(tl.div_rn(largest, tl.full((ROWS,), 448.0, tl.float32)))
    divided = tl.div_rn(mixed, tl.broadcast_to(scale[:, None], (ROWS, D)))
    place = token * heads + head
    tl.store(out + place[:, None] * D + d[None, :], encode_e4m3(divided), mask=mine[:, None])
    gate = tl.load(gates + token * gates_token + head * gates_head, mask=mine, other=0.0).to(tl.float32)
    tl.store(weights + place, gate * scale * factor, mask=mine)


@jit(do_not_specialize=["count"])
def write(
    key, slots, values, scales, count, size, key_row, key_column, slots_stride, values_block, scales_block,
    PAGE: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row.to(tl.int64) * slots_stride, mask=row < count, other=-1).to(tl.int64)
    real = slot >= 0
    slot = tl.where(real, slot, 0)
    column = tl.arange(0, COLUMNS)
    inside = real[:, None] & (column < size)[None, :]
    at = (row.to(tl.int64) * key_row)[:, None] + (column * key_column)[None, :]
    x = tl.load(key + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    scale = tl.div_rn(largest, tl.full((ROWS,), 448.0, tl.float32))
    if POWER_OF_TWO:
        scale = power_of_two_above(scale)
    divided = tl.div_rn(x, tl.broadcast_to(scale[:, None], (ROWS, COLUMNS)))
    block = slot // PAGE
    place = slot % PAGE
    at = (block * values_block + place * size)[:, None] + column[None, :]
    tl.store(values + at, encode_e4m3(divided), mask=inside)
    tl.store(scales + block * scales_block + place, scale, mask=real)


@jit(do_not_specialize=["total", "requests", "table_row"])
def gather(
    values, scales, block_table, cu_seqlens, key, key_scale, total, requests, size,
    table_row, table_column, values_block, scales_block,
    PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of the result; the request of each is the number of requests that end at or before it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owner = tl.zeros((ROWS,), tl.int32)
    for first in range(0, requests, 128):
        number = first + tl.arange(0, 128)
        listed = number < requests
        stop = tl.load(cu_seqlens + 1 + number, mask=listed, other=0)
        owner += tl.sum((listed[None, :] & (stop[None, :] <= row[:, None])).to(tl.int32), 1)
    inside = row < total
    real = inside & (owner < requests)
    position = row - tl.load(cu_seqlens + owner, mask=real, other=0)
    at = owner.to(tl.int64) * table_row + (position // PAGE).to(tl.int64) * table_column
    block = tl.load(block_table + at, mask=real, other=0).to(tl.int64)
    place = position % PAGE
    column = tl.arange(0, COLUMNS)
    wanted = column < size
    at = (block * values_block + place * size)[:, None] + column[None, :]
    x = tl.load(values + at, mask=real[:, None] & wanted[None, :], other=0)
    scale = tl.load(scales + block * scales_block + place, mask=real, other=0.0)
    tl.store(key + row.to(tl.int64)[:, None] * size + column[None, :], x, mask=inside[:, None] & wanted[None, :])
    tl.store(key_scale + row, scale, mask=inside)


@jit
def _typed(x, FP8: tl.constexpr):
    """E4M3 bytes as the matrix unit takes them: as they are, or exactly widened."""
    x = x.to(tl.float8e4nv, bitcast=True)
    if not FP8:
        x = x.to(tl.bfloat16)
    return x


@jit
def _score(key, scale, q, weights):
    """key [KEYS, D], scale [KEYS], q [H, D], weights [H] -> [KEYS]."""
    scores = tl.dot(key, tl.trans(q))
    return tl.sum(tl.maximum(scores, 0.0) * weights[None, :], 1) * scale


@jit(do_not_specialize=["tokens", "columns", "out_row"])
def logits_ragged(
    q, key, key_scale, weights, start, end, out, tokens, columns, heads, size,
    q_token, q_head, key_row, scale_stride, weights_token, weights_head, start_stride, end_stride, out_row,
    FP8: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of keys against TOKENS queries, one after the other; a tile that none of them sees is left alone."""
    first = tl.program_id(1) * TOKENS
    token = first + tl.arange(0, TOKENS)
    listed = token < tokens
    begins = tl.load(start + token.to(tl.int64) * start_stride, mask=listed, other=0)
    ends = tl.load(end + token.to(tl.int64) * end_stride, mask=listed, other=0)
    low = tl.min(tl.where(begins < ends, begins, columns))
    high = tl.max(tl.where(begins < ends, ends, 0))
    if (tl.program_id(0) * KEYS >= high) | (tl.program_id(0) * KEYS + KEYS <= low):
        return
    column = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    stored = column < columns
    head = tl.arange(0, H)
    d = tl.arange(0, D)
    at = (column.to(tl.int64) * key_row)[:, None] + d[None, :]
    x = tl.load(key + at, mask=stored[:, None] & (d < size)[None, :], other=0)
    scale = tl.load(key_scale + column.to(tl.int64) * scale_stride, mask=stored, other=0.0)
    x = _typed(x, FP8)
    q_at = (head * q_head)[:, None] + d[None, :]
    q_inside = (head < heads)[:, None] & (d < size)[None, :]
    wide_first = first.to(tl.int64)
    q += wide_first * q_token
    weights += wide_first * weights_token
    out += wide_first * out_row
    for t in tl.range(0, tl.minimum(TOKENS, tokens - first), num_stages=STAGES):
        query = _typed(tl.load(q + t * q_token + q_at, mask=q_inside, other=0), FP8)
        factor = tl.load(weights + t * weights_token + head * weights_head, mask=head < heads, other=0.0)
        tl.store(out + t * out_row + column, _score(x, scale, query, factor), mask=stored)


@jit(do_not_specialize=["columns", "table_row"])
def logits_paged(
    q, values, scales, weights, block_table, requests, lengths, out, columns, heads, size,
    q_token, q_head, weights_token, weights_head, table_row, table_column, requests_stride, lengths_stride,
    values_block, scales_block,
    HAS_REQUESTS: tl.constexpr, FP8: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query; its tiles of keys are dealt out to the programs of the second axis."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    owner = token
    if HAS_REQUESTS:
        owner = tl.load(requests + token * requests_stride).to(tl.int64)
    length = tl.minimum(tl.load(lengths + token * lengths_stride), columns)
    length = tl.where(owner >= 0, tl.maximum(length, 0), 0)
    line = out + token * columns
    head = tl.arange(0, H)
    d = tl.arange(0, D)
    q_at = token * q_token + (head * q_head)[:, None] + d[None, :]
    query = _typed(tl.load(q + q_at, mask=(head < heads)[:, None] & (d < size)[None, :], other=0), FP8)
    factor = tl.load(weights + token * weights_token + head * weights_head, mask=head < heads, other=0.0)
    table = block_table + owner * table_row
    for first in tl.range(part * KEYS, length, parts * KEYS, num_stages=STAGES):
        position = first + tl.arange(0, KEYS)
        inside = position < length
        if PAGE % KEYS == 0:
            block = tl.load(table + (first // PAGE) * table_column).to(tl.int64)
            place = first % PAGE + tl.arange(0, KEYS)
        else:
            block = tl.load(table + (position // PAGE) * table_column, mask=inside, other=0).to(tl.int64)
            place = position % PAGE
        at = (block * values_block + place * size)[:, None] + d[None, :]
        x = _typed(tl.load(values + at, mask=inside[:, None] & (d < size)[None, :], other=0), FP8)
        scale = tl.load(scales + block * scales_block + place, mask=inside, other=0.0)
        tl.store(line + position, _score(x, scale, query, factor), mask=inside)


@jit(do_not_specialize=["blocks", "table_row"])
def local_to_paged(
    indices, requests, block_table, out, top_k, blocks, indices_row, indices_column, requests_stride,
    table_row, table_column, HAS_REQUESTS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    owner = row
    if HAS_REQUESTS:
        owner = tl.load(requests + row * requests_stride).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    stored = column < top_k
    index = tl.load(indices + row * indices_row + column * indices_column, mask=stored, other=-1)
    number = index // PAGE
    real = (index >= 0) & (number < blocks) & (owner >= 0)
    at = owner * table_row + number.to(tl.int64) * table_column
    block = tl.load(block_table + at, mask=real, other=0)
    slot = tl.where(real, block * PAGE + index % PAGE, -1)
    tl.store(out + row * top_k + column, slot, mask=stored)
