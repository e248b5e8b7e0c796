"""Split, norms, rotation and cache write by AITER's Triton kernel; never run on AMD hardware.

Its norms are those of Gemma: the weights count as 1 + w. That is in the kernel and its test only, not in its signature,
so a later AITER could change it unnoticed. It needs both norms, a rotation by one row of positions and a cache, reads a
slot for every token, and does not limit what it writes into an FP8 cache: other calls are refused. The queries, keys
and values come back dense; the values are dropped, since ours are a view of qkv.

Called as in AITER's `op_tests/triton_tests/rope/test_fused_qkv_split_qk_rope.py`; function and commit are in
`call_site`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from atom_patches.kernels.aiter_binding import Function
from atom_patches.kernels.registry import Verdict, no

FUSED = Function(
    "aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache:fused_qkv_split_qk_norm_rope_cache",
    (
        "qkv", "q_weight", "k_weight", "cos", "sin", "positions", "key_cache", "value_cache", "slot_mapping",
        "qh", "kvh", "head_dim",
    ),
    ("is_neox", "reuse_freqs_front_part", "attn_output_gate", "eps", "gated_qkv_layout", "kv_cache_layout"),
    call_site="ROCm/aiter 01397886be37 op_tests/triton_tests/rope/test_fused_qkv_split_qk_rope.py: "
    "test_fused_qkv_split_qk_rope_with_cache",
)  # fmt: skip


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
    if not gemma:
        return no("AITER's kernel multiplies by 1 + weight, as with gemma; plain weights it would get wrong")
    if q_weight is None or k_weight is None:
        return no("AITER's kernel norms queries and keys; one has no weight")
    if positions is None or cos_sin_cache is None or positions.dim() != 1 or not cos_sin_cache.shape[1]:
        return no("AITER's kernel rotates by one row of positions, [T]")
    if cos_sin_cache.dtype != qkv.dtype:
        return no(f"AITER's call sites have a table of qkv's dtype ({qkv.dtype}), not {cos_sin_cache.dtype}")
    if key_cache is None or value_cache is None or slots is None:
        return no("AITER's kernel writes into a cache, and there is none")
    if qkv.dtype not in (torch.bfloat16, torch.float16):
        return no(f"AITER's call sites have bfloat16 or float16, not {qkv.dtype}")
    if key_cache.dtype != qkv.dtype:
        return no(f"AITER's kernel does not limit values to the range of a {key_cache.dtype} cache")
    if not q_weight.dtype == k_weight.dtype == qkv.dtype:
        return no(f"AITER's call sites have weights of qkv's dtype, not {q_weight.dtype} and {k_weight.dtype}")
    if head_dim & (head_dim - 1):
        return no(f"AITER's kernel takes head sizes that are powers of two, not {head_dim}")
    if num_q_heads < num_kv_heads or num_q_heads % num_kv_heads:
        return no(f"{num_q_heads} query heads are no multiple of {num_kv_heads} key heads")
    return FUSED.verdict()


def qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
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
    if not tokens:
        q, k = (qkv.new_empty((0, heads, head_dim)) for heads in (num_q_heads, num_kv_heads))
        return q, k, torch.empty_like(q)
    cos, sin = cos_sin_cache.chunk(2, dim=1)
    results = FUSED(
        qkv,
        q_weight.contiguous(),
        k_weight.contiguous(),
        cos,
        sin,
        positions,
        key_cache,
        value_cache,
        pad(slots, (0, tokens - slots.shape[0]), value=-1).contiguous(),
        num_q_heads,
        num_kv_heads,
        head_dim,
        is_neox=neox,
        reuse_freqs_front_part=True,
        attn_output_gate=gated,
        eps=eps,
        gated_qkv_layout="interleaved",
        kv_cache_layout="NHD",
    )
    if gated:
        q, gate, k, _ = results
        return q, k, gate
    q, k, _ = results
    return q, k, qkv.new_empty((0, num_q_heads, head_dim))
