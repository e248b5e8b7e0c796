"""Split, norm, rotary embedding and cache write in one Triton kernel: every value comes from and goes to memory once.

A program takes one token and some of its query heads, or some of its key and value heads.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.launch import converts_e4m3
from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import power_of_two, programs

LARGEST_HEAD = 1024


def supports_qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    gemma: bool,
    gated: bool,
    neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool,
) -> Verdict:
    if head_dim > LARGEST_HEAD:
        return no(f"a head of {head_dim} values does not fit into registers; at most {LARGEST_HEAD}")
    for name, tensor in (("qkv", qkv), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor is not None and tensor.stride(-1) != 1:
            return no(f"the last dimension of {name} must be contiguous, its stride is {tensor.stride(-1)}")
    if key_cache is not None and key_cache.dtype == torch.float8_e4m3fn and not converts_e4m3():
        return no("Triton writes E4M3 from compute capability 8.9 on")
    if key_cache is not None and key_cache.dtype == torch.float8_e4m3fnuz and torch.version.hip is None:
        return no("Triton converts to float8_e4m3fnuz on AMD GPUs only")
    return YES


class Config(NamedTuple):
    """How many query heads, and key and value heads, a program takes, and its warps."""

    q_heads: int
    kv_heads: int
    warps: int


def config(tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Config:
    """One head a program while there are few programs, else about 1024 values; of one warp, so that no value and no
    sum has to cross from warp to warp."""
    most = 1 if tokens <= 64 else max(1, 1024 // power_of_two(head_dim))
    return Config(min(most, power_of_two(num_q_heads)), min(most, power_of_two(num_kv_heads)), 1)


def qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    gemma: bool,
    gated: bool,
    neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = qkv.shape[0]
    q = torch.empty((tokens, num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((tokens, num_kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    gate = torch.empty((tokens if gated else 0, num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q, k, gate
    q_heads, kv_heads, warps = config(tokens, num_q_heads, num_kv_heads, head_dim)
    rotary, angle_strides = 0, (0, 0)
    if cos_sin_cache is not None:
        rotary, angle_strides = cos_sin_cache.shape[1], cos_sin_cache.stride()
    axis_stride = token_stride = 0
    mrope, section = False, (0, 0, 0)
    if positions is not None:
        token_stride = positions.stride(-1)
        if positions.dim() == 2 and mrope_section is not None:
            mrope, section, axis_stride = True, mrope_section, positions.stride(0)
    paged, block_size, limit, num_slots, slot_stride, cache_strides = False, 1, 0.0, 0, 0, (0, 0, 0, 0, 0, 0)
    if key_cache is not None and value_cache is not None and slots is not None:
        paged, block_size = True, key_cache.shape[1]
        num_slots, slot_stride = slots.shape[0], slots.stride(0)
        cache_strides = (*key_cache.stride()[:3], *value_cache.stride()[:3])
        if key_cache.dtype != qkv.dtype:
            limit = torch.finfo(key_cache.dtype).max
    q_programs = programs(num_q_heads, q_heads)
    _qk_norm_rope_cache[(tokens, q_programs + programs(num_kv_heads, kv_heads))](
        qkv, positions, cos_sin_cache, q_weight, k_weight, q, k, gate,
        key_cache, value_cache, slots, k_scale, v_scale, num_slots, eps,
        qkv.stride(0), axis_stride, token_stride, *angle_strides,
        0 if q_weight is None else q_weight.stride(0), 0 if k_weight is None else k_weight.stride(0),
        slot_stride, *cache_strides,
        HQ=num_q_heads, HK=num_kv_heads, D=head_dim, HALF=rotary // 2,
        GEMMA=gemma, GATED=gated, NEOX=neox, PAGED=paged, BLOCK_SIZE=block_size, LIMIT=limit,
        MROPE=mrope, INTERLEAVED=mrope_interleaved, TIME=section[0], HEIGHT=section[1], WIDTH=section[2],
        Q_PROGRAMS=q_programs, Q_HEADS=q_heads, KV_HEADS=kv_heads, COLUMNS=power_of_two(head_dim), num_warps=warps,
    )  # fmt: skip
    return q, k, gate


@jit(do_not_specialize=["num_slots", "position_axis"])
def _qk_norm_rope_cache(
    qkv, positions, cos_sin, q_weight, k_weight, q, k, gate,
    key_cache, value_cache, slots, k_scale, v_scale, num_slots, eps,
    qkv_row, position_axis, position_token, cos_sin_row, cos_sin_column, q_weight_stride, k_weight_stride, slot_stride,
    key_block, key_row, key_head, value_block, value_row, value_head,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    GEMMA: tl.constexpr, GATED: tl.constexpr, NEOX: tl.constexpr, PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    MROPE: tl.constexpr, INTERLEAVED: tl.constexpr, TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    Q_PROGRAMS: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Loads come first, those that wait for no other load at the front.
    token = tl.program_id(0)
    part = tl.program_id(1)
    wide = token.to(tl.int64)
    line = qkv + wide * qkv_row
    column = tl.arange(0, COLUMNS)[None, :]
    at_time = cos_sin
    at_height = cos_sin
    at_width = cos_sin
    if HALF > 0:
        place = positions + wide * position_token
        at_time += tl.load(place).to(tl.int64) * cos_sin_row
        if MROPE:
            at_height += tl.load(place + position_axis).to(tl.int64) * cos_sin_row
            at_width += tl.load(place + 2 * position_axis).to(tl.int64) * cos_sin_row

    if part < Q_PROGRAMS:
        head = part * Q_HEADS + tl.arange(0, Q_HEADS)[:, None]
        queries = line + head * (2 * D if GATED else D)
        q_place = (wide * HQ + head) * D + column
        q_inside = (head < HQ) & (column < D)
        if GATED:
            opening = tl.load(queries + D + column, mask=q_inside)
        q_values = _normed_and_turned(
            queries, head < HQ, q_weight, q_weight_stride, at_time, at_height, at_width, cos_sin_column, eps,
            D, HALF, GEMMA, NEOX, MROPE, INTERLEAVED, TIME, HEIGHT, WIDTH, COLUMNS,
        )  # fmt: skip
        tl.store(q + q_place, q_values.to(q.dtype.element_ty), mask=q_inside)
        if GATED:
            tl.store(gate + q_place, opening, mask=q_inside)
    else:
        kv_head = (part - Q_PROGRAMS) * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
        keys = line + (2 * HQ * D if GATED else HQ * D) + kv_head * D
        kv_inside = (kv_head < HK) & (column < D)
        if PAGED:
            slot = tl.load(slots + wide * slot_stride, mask=token < num_slots, other=-1).to(tl.int64)
            values = tl.load(keys + HK * D + column, mask=kv_inside, other=0.0)
        k_values = _normed_and_turned(
            keys, kv_head < HK, k_weight, k_weight_stride, at_time, at_height, at_width, cos_sin_column, eps,
            D, HALF, GEMMA, NEOX, MROPE, INTERLEAVED, TIME, HEIGHT, WIDTH, COLUMNS,
        ).to(k.dtype.element_ty)  # fmt: skip
        tl.store(k + (wide * HK + kv_head) * D + column, k_values, mask=kv_inside)
        if PAGED:
            block = slot // BLOCK_SIZE
            row = slot % BLOCK_SIZE
            kept = kv_inside & (slot >= 0)
            wide_head = kv_head.to(tl.int64)
            key_place = block * key_block + row * key_row + wide_head * key_head + column
            tl.store(key_cache + key_place, _as_cached(k_values, k_scale, key_cache, LIMIT), mask=kept)
            value_place = block * value_block + row * value_row + wide_head * value_head + column
            tl.store(value_cache + value_place, _as_cached(values, v_scale, value_cache, LIMIT), mask=kept)


@jit
def _normed_and_turned(
    source, exists, weight, weight_stride, at_time, at_height, at_width, angle_stride, eps,
    D: tl.constexpr, HALF: tl.constexpr, GEMMA: tl.constexpr, NEOX: tl.constexpr,
    MROPE: tl.constexpr, INTERLEAVED: tl.constexpr, TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The heads at `source`, [H, COLUMNS] in float32. Every value of a pair is computed from itself and from its
    partner, which is loaded once more, from the first-level cache: so no value changes threads."""
    column = tl.arange(0, COLUMNS)
    values = tl.load(source + column[None, :], mask=exists & (column < D)[None, :], other=0.0).to(tl.float32)
    turned = column < 2 * HALF
    if NEOX:
        first = column < HALF
        partner = tl.where(first, column + HALF, column - HALF)
        angle = tl.where(first, column, column - HALF)
        if HALF % 8 == 0:
            partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
            angle = tl.max_contiguous(tl.multiple_of(angle, 8), 8)
    else:
        first = column % 2 == 0
        partner = tl.where(first, column + 1, column - 1)
        angle = column // 2
    if HALF > 0:
        partners = tl.load(source + partner[None, :], mask=exists & turned[None, :], other=0.0).to(tl.float32)
    if weight is not None:
        factor = tl.load(weight + column * weight_stride, mask=column < D, other=0.0).to(tl.float32)
        if GEMMA:
            factor += 1.0
        if HALF > 0:
            partner_factor = tl.load(weight + partner * weight_stride, mask=turned, other=0.0).to(tl.float32)
            if GEMMA:
                partner_factor += 1.0
    if HALF > 0:
        cos_place = angle * angle_stride
        sin_place = (HALF + angle) * angle_stride
        cos = tl.load(at_time + cos_place, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(at_time + sin_place, mask=turned, other=0.0).to(tl.float32)
        if MROPE:
            if INTERLEAVED:
                is_height = (angle % 3 == 1) & (angle < 3 * HEIGHT)
                is_width = (angle % 3 == 2) & (angle < 3 * WIDTH)
            else:
                is_height = (angle >= TIME) & (angle < TIME + HEIGHT)
                is_width = angle >= TIME + HEIGHT
            # Whole rows, of which most is not used: a mask that changes from angle to angle would cost vector loads.
            cos = tl.where(is_height, tl.load(at_height + cos_place, mask=turned, other=1.0).to(tl.float32), cos)
            sin = tl.where(is_height, tl.load(at_height + sin_place, mask=turned, other=0.0).to(tl.float32), sin)
            cos = tl.where(is_width, tl.load(at_width + cos_place, mask=turned, other=1.0).to(tl.float32), cos)
            sin = tl.where(is_width, tl.load(at_width + sin_place, mask=turned, other=0.0).to(tl.float32), sin)
        sin = tl.where(first, -sin, sin)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / D + eps)
        values *= scale * factor[None, :]
        if HALF > 0:
            partners *= scale * partner_factor[None, :]
    if HALF > 0:
        values = values * cos[None, :] + partners * sin[None, :]
    return values


@jit
def _as_cached(values, scale, cache, LIMIT: tl.constexpr):
    """Values as the cache holds them: of an FP8 cache (LIMIT is not 0) divided by the scale and limited."""
    if LIMIT > 0.0:
        values = values.to(tl.float32)
        if scale is not None:
            values = tl.div_rn(values, tl.load(scale).to(tl.float32))
        values = tl.minimum(tl.maximum(values, -LIMIT), LIMIT)
    return values.to(cache.dtype.element_ty)
