"""Split, norm, rotary embedding and cache write in plain torch, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    """See the package's schema."""
    tokens, kv_size = qkv.shape[0], num_kv_heads * head_dim
    queries, keys, values = qkv.split([qkv.shape[1] - 2 * kv_size, kv_size, kv_size], dim=1)
    queries = queries.reshape(tokens, num_q_heads, 2 * head_dim if gated else head_dim)
    gate = queries[..., head_dim:].clone(memory_format=torch.contiguous_format)
    q = _normalised(queries[..., :head_dim], q_weight, eps, gemma)
    k = _normalised(keys.reshape(tokens, num_kv_heads, head_dim), k_weight, eps, gemma)
    if positions is not None and cos_sin_cache is not None:
        cos, sin = _angles(positions, cos_sin_cache.float(), mrope_section, mrope_interleaved)
        q, k = _rotated(q, cos, sin, neox), _rotated(k, cos, sin, neox)
    q, k = q.to(qkv.dtype), k.to(qkv.dtype)
    if key_cache is not None and value_cache is not None and slots is not None:
        _write(key_cache, k, slots, k_scale)
        _write(value_cache, values.reshape(tokens, num_kv_heads, head_dim), slots, v_scale)
    return q, k, gate if gated else qkv.new_empty((0, num_q_heads, head_dim))


def _normalised(heads: Tensor, weight: Tensor | None, eps: float, gemma: bool) -> Tensor:
    """[T, H, D] in float32, contiguous."""
    wide = heads.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if weight is None:
        return wide
    factor = weight.float() + 1.0 if gemma else weight.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor


def _angles(
    positions: Tensor, cache: Tensor, section: Sequence[int] | None, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R/2] of every token."""
    half = cache.shape[1] // 2
    if positions.dim() == 1:
        chosen = cache[positions.long()]
        return chosen[:, :half], chosen[:, half:]
    assert section is not None
    time, height, width = section
    if interleaved:
        axis = [1 if i % 3 == 1 and i < 3 * height else 2 if i % 3 == 2 and i < 3 * width else 0 for i in range(half)]
    else:
        axis = [0] * time + [1] * height + [2] * width
    angle = torch.arange(half, device=positions.device)
    row = positions.long()[torch.tensor(axis, device=positions.device)].T
    return cache[row, angle], cache[row, half + angle]


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    """[T, H, D] with the first values of every head turned by the token's angles."""
    half = cos.shape[1]
    first = slice(0, half) if neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if neox else slice(1, 2 * half, 2)
    x, y = heads[..., first], heads[..., second]
    cos, sin = cos[:, None], sin[:, None]
    out = heads.clone()
    out[..., first] = x * cos - y * sin
    out[..., second] = y * cos + x * sin
    return out


def _write(cache: Tensor, heads: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Put the heads [T, HK, D] of every token that has a slot into the cache, scaled if the cache is FP8."""
    held = slots >= 0
    rows, heads = slots[held].long(), heads[: slots.shape[0]][held]
    if cache.dtype != heads.dtype:
        largest = torch.finfo(cache.dtype).max
        scaled = heads.float() if scale is None else heads.float() / scale.float()
        heads = scaled.clamp(-largest, largest).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache[rows // cache.shape[1], rows % cache.shape[1]] = heads
