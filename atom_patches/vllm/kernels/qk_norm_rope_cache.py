"""vLLM's way from the projection to attention: what the model, its layers and FlashAttention's backend launch, one
kernel after the other, outside a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope

from atom_patches.kernels.registry import YES, Verdict, no

from . import rms_norm as norm
from ._scale import one


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
    if qkv.shape[0] == 0:
        return no("vLLM launches no kernel for zero rows")
    if qkv.stride(1) != 1:
        return no("vLLM's kernels take contiguous columns")
    if not gemma and any(w is not None and w.dtype != qkv.dtype for w in (q_weight, k_weight)):
        return no("vLLM's norm takes a weight of x's dtype")
    if positions is not None and cos_sin_cache is not None:
        if cos_sin_cache.dtype != qkv.dtype or not cos_sin_cache.is_contiguous():
            return no("vLLM's rotary embedding takes a contiguous table of x's dtype")
        if positions.dtype != torch.int64 or not positions.is_contiguous():
            return no("vLLM's rotary embedding takes contiguous int64 positions")
        if num_q_heads % num_kv_heads:
            return no("vLLM's rotary embedding wants a multiple of the key heads as query heads")
        if positions.dim() == 2 and not neox:
            return no("vLLM's M-RoPE kernel has the neox layout only")
    if slots is not None and (slots.dtype != torch.int64 or not slots.is_contiguous()):
        return no("vLLM's cache write takes contiguous int64 slots")
    if slots is not None and key_cache is not None and value_cache is not None:
        if key_cache.dtype == torch.float8_e4m3fnuz and torch.version.hip is None:
            return no("vLLM writes float8_e4m3fnuz on AMD GPUs only")
        if key_cache.stride() != value_cache.stride():
            return no("vLLM's cache write takes two caches of the same strides")
        if slots.numel() == 0:
            return no("vLLM launches no kernel for zero rows")
    return YES


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
    tokens, q_size, kv_size = qkv.shape[0], num_q_heads * head_dim, num_kv_heads * head_dim
    if gated:
        q_gate, k, v = qkv.split([2 * q_size, kv_size, kv_size], dim=-1)
        q, gate = q_gate.view(tokens, num_q_heads, -1).chunk(2, dim=-1)
        q, gate = q.reshape(tokens, -1), gate.reshape(tokens, -1)
    else:
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        gate = qkv.new_empty((0, q_size))
    q = _normalised(q.view(tokens, num_q_heads, head_dim), q_weight, eps, gemma, owned=gated)
    k = _normalised(k.view(tokens, num_kv_heads, head_dim), k_weight, eps, gemma, owned=False)
    if positions is not None and cos_sin_cache is not None:
        if positions.dim() == 1:
            ops.rotary_embedding(positions, q, k, head_dim, cos_sin_cache, neox)
        else:
            assert mrope_section is not None
            cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
            rotary = cos_sin_cache.shape[1]
            q, k = triton_mrope(q, k, cos, sin, list(mrope_section), head_dim, rotary, mrope_interleaved)
    q, k = q.view(tokens, num_q_heads, head_dim), k.view(tokens, num_kv_heads, head_dim)
    if key_cache is not None and value_cache is not None and slots is not None:
        scaled = key_cache.dtype != qkv.dtype
        unscaled = one(qkv.device)
        ops.reshape_and_cache_flash(
            k,
            v.view(tokens, num_kv_heads, head_dim),
            key_cache.view(torch.uint8) if scaled else key_cache,
            value_cache.view(torch.uint8) if scaled else value_cache,
            slots,
            "fp8" if scaled else "auto",
            unscaled if k_scale is None else k_scale,
            unscaled if v_scale is None else v_scale,
        )
    return q, k, gate.view(-1, num_q_heads, head_dim)


def _normalised(heads: Tensor, weight: Tensor | None, eps: float, gemma: bool, *, owned: bool) -> Tensor:
    """[T, H * D], in memory that the rotary embedding may overwrite."""
    if weight is not None:
        heads = norm.rms_norm(heads, weight, eps, gemma)
    elif not owned:
        heads = heads.clone(memory_format=torch.contiguous_format)
    return heads.reshape(heads.shape[0], -1)
