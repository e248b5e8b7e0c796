"""Absorbed multi-head latent attention and its cache in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom_patches.kernels import e4m3

from .layout import GROUP, Layout, layout_of, parts_of

#: Rows of queries that gather their keys together: what bounds the memory.
CHUNK = 64
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    cache_scale: Tensor | None,
    value_size: int,
) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    out, lse = _empty_results(q, value_size)
    page = cache.shape[1]
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens_k.tolist()
    for i, length in enumerate(lengths):
        rows = slice(bounds[i], bounds[i + 1])
        count = rows.stop - rows.start
        if not count or not length:
            continue
        position = torch.arange(length, device=q.device)
        slots = block_table[i].long()[position // page] * page + position % page
        keys = _keys(cache, slots, q, value_size, cache_scale)
        for first in range(rows.start, rows.stop, CHUNK):
            some = slice(first, min(first + CHUNK, rows.stop))
            limit = length - rows.stop + torch.arange(some.start, some.stop, device=q.device)
            visible = position[None, :] <= limit[:, None]
            out[some], lse[some] = _attend(q[some], keys[None], visible, scale, value_size)
    return out, lse


def sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    out, lse = _empty_results(q, value_size)
    for first in range(0, q.shape[0], CHUNK):
        some = slice(first, first + CHUNK)
        used = indices[some] >= 0
        slots = indices[some].long().clamp_min(0)
        keys = _keys(cache, slots, q, value_size, cache_scale).masked_fill(~used[:, :, None], 0.0)
        out[some], lse[some] = _attend(q[some], keys, used, scale, value_size)
    return out, lse


def mla_cache_write(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None) -> None:
    """See the package's schema."""
    parts = parts_of(cache, latent.shape[1], rope.shape[1])
    page = cache.shape[1]
    real = slots >= 0
    block, place = slots[real].long() // page, slots[real].long() % page
    latent, rope = latent[real], rope[real]
    if parts.layout is Layout.PLAIN:
        parts.latent[block, place] = latent.to(cache.dtype)
        parts.rope[block, place] = rope.to(cache.dtype)
    elif parts.layout is Layout.SCALED:
        assert cache_scale is not None
        parts.latent.view(torch.uint8)[block, place] = e4m3.quantize(latent, cache_scale).view(torch.uint8)
        parts.rope.view(torch.uint8)[block, place] = e4m3.quantize(rope, cache_scale).view(torch.uint8)
    else:
        assert parts.scales is not None
        groups = latent.unflatten(1, (-1, GROUP))
        scales = e4m3.scale_of(groups, 0.0).clamp_min(SMALLEST_NORMAL)
        values = e4m3.quantize(groups, scales).flatten(1)
        parts.latent.view(torch.uint8)[block, place] = values.view(torch.uint8)
        parts.scales[block, place] = scales.squeeze(-1)
        parts.rope[block, place] = rope.bfloat16()


def _keys(cache: Tensor, slots: Tensor, q: Tensor, latent_size: int, cache_scale: Tensor | None) -> Tensor:
    """The rows at `slots` as these queries read them, [..., D] float32."""
    keys = read(cache, slots, q.shape[-1], latent_size, cache_scale)
    packed = layout_of(cache, latent_size, q.shape[-1] - latent_size) is Layout.PACKED
    return keys.to(q.dtype).float() if packed else keys


def read(cache: Tensor, slots: Tensor, size: int, latent_size: int, cache_scale: Tensor | None) -> Tensor:
    """The rows at `slots` (any shape), dequantised: [..., size] float32. No other row is touched."""
    layout, latent, scales, rope = parts_of(cache, latent_size, size - latent_size)
    page = cache.shape[1]
    at = slots // page, slots % page
    if layout is Layout.PLAIN:
        return cache[at].float()
    left, right = latent.view(torch.uint8)[at].view(e4m3.DTYPE).float(), rope
    if layout is Layout.SCALED:
        assert cache_scale is not None
        right = rope.view(torch.uint8)[at].view(e4m3.DTYPE).float()
        return torch.cat([left, right], dim=-1) * cache_scale
    assert scales is not None
    left = left * scales[at].repeat_interleave(GROUP, dim=-1)
    return torch.cat([left, rope[at].float()], dim=-1)


def _empty_results(q: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
    rows, heads = q.shape[:2]
    out = torch.zeros(rows, heads, value_size, dtype=q.dtype, device=q.device)
    return out, torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)


def _attend(q: Tensor, keys: Tensor, visible: Tensor, scale: float, value_size: int) -> tuple[Tensor, Tensor]:
    """q [C, H, D] over keys [C or 1, K, D] where visible [C, K]."""
    scores = (q.float() @ keys.mT * scale).masked_fill(~visible[:, None, :], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return (weights @ keys[..., :value_size]).to(q.dtype), lse
