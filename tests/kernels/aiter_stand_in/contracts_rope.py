"""Contract of AITER's fused split, norm, rotation and cache write (Triton)."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOAT16, Arguments, contract

INDEX = (torch.int32, torch.int64)


@contract(
    "aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache:fused_qkv_split_qk_norm_rope_cache",
    "qkv q_weight k_weight cos sin positions key_cache value_cache slot_mapping qh kvh head_dim is_neox "
    "reuse_freqs_front_part attn_output_gate eps gated_qkv_layout kv_cache_layout",
    "ROCm/aiter 367324ee8c01 aiter/ops/triton/rope/fused_qkv_split_qk_norm_rope_cache.py",
    "ROCm/aiter 367324ee8c01 aiter/ops/triton/_triton_kernels/rope/fused_qkv_split_qk_norm_rope_cache.py",
    "ROCm/aiter 01397886be37 op_tests/triton_tests/rope/test_fused_qkv_split_qk_rope.py",
)
def fused_qkv_split_qk_norm_rope_cache(a: Arguments) -> tuple[Tensor, ...]:
    """The weights count as 1 + w, which only the kernel and its test say. Of the caches' layouts HND is the default;
    the strides are read, and slots below 0 are written nowhere. Every token needs a slot."""
    heads, kv_heads, size = (a.integer(n) for n in ("qh", "kvh", "head_dim"))
    a.require(heads >= kv_heads > 0 and heads % kv_heads == 0, "qh must be a multiple of kvh")
    a.require(size > 0 and size & (size - 1) == 0, "head_dim must be a power of two")
    gated = a.flag("attn_output_gate")
    width = (heads * (2 if gated else 1) + 2 * kv_heads) * size
    qkv = a.tensor("qkv", shape=(None, width), dtype=FLOAT16, layout="strided")
    tokens = qkv.shape[0]
    a.require(tokens > 0, "no rows: an empty grid is launched")
    weights = [a.tensor(n, shape=(size,), dtype=FLOAT16, layout="contiguous") for n in ("q_weight", "k_weight")]
    cos, sin = (a.tensor(n, shape=(None, None), dtype=qkv.dtype, layout="strided") for n in ("cos", "sin"))
    a.require(cos.shape == sin.shape and cos.stride() == sin.stride(), "sin is read with the strides of cos")
    a.require(a.flag("reuse_freqs_front_part"), "tables of the full width are not covered")
    half = cos.shape[1]
    a.require(0 < 2 * half <= size, f"{half} angles are more than half of head_dim")
    positions = a.tensor("positions", shape=(tokens,), dtype=INDEX, layout="strided")
    slots = a.tensor("slot_mapping", shape=(tokens,), dtype=INDEX, layout="contiguous")
    layout = a.get("kv_cache_layout")
    a.require(layout in ("HND", "NHD"), f"kv_cache_layout {layout!r} is neither HND nor NHD")
    shape = (None, kv_heads, None, size) if layout == "HND" else (None, None, kv_heads, size)
    caches = [a.tensor(n, shape=shape, dtype=qkv.dtype, layout="strided") for n in ("key_cache", "value_cache")]
    a.require(caches[0].shape == caches[1].shape, "the caches differ in shape")
    neox, eps = a.flag("is_neox"), a.number("eps")

    rows = qkv[:, : width - 2 * kv_heads * size].unflatten(1, (heads, -1))
    if gated and a.get("gated_qkv_layout") == "blocked":
        rows = qkv[:, : 2 * heads * size].unflatten(1, (2, heads, size)).transpose(1, 2).flatten(2)
    else:
        a.require(a.get("gated_qkv_layout") == "interleaved", "gated_qkv_layout is neither interleaved nor blocked")
    q, gate = rows[..., :size], rows[..., size:]
    k, v = qkv[:, width - 2 * kv_heads * size :].unflatten(1, (2, kv_heads, size)).unbind(1)
    angles = cos[positions.long()].float()[:, None], sin[positions.long()].float()[:, None]
    q, k = (_rotated(_normalised(x, w, eps), *angles, neox) for x, w in zip((q, k), weights, strict=True))
    for cache, values in zip(caches, (k, v), strict=True):
        pages = cache.transpose(1, 2) if layout == "HND" else cache
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < pages.shape[0] * pages.shape[1]:
                pages[slot // pages.shape[1], slot % pages.shape[1]] = values[token]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return (q, gate.contiguous(), k, v) if gated else (q, k, v)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    pairs = turned.unflatten(-1, (2, half)).transpose(-1, -2) if neox else turned.unflatten(-1, (half, 2))
    first, second = pairs.unbind(-1)
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    flat = pairs.transpose(-1, -2).flatten(-2) if neox else pairs.flatten(-2)
    return torch.cat([flat.to(x.dtype), rest], -1)
