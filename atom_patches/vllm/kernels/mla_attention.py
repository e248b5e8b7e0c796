"""vLLM's latent attention on NVIDIA GPUs: FlashMLA, called as its FlashMLA and FlashMLA-sparse backends call it.

FlashMLA plans the split over keys in its first call with a plan object; the backends keep one a step for all layers,
here every call has its own. A query without keys has +inf for its log-sum-exp there, and -inf here.
"""

# pyright: reportPrivateImportUsage=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.ops import flashmla

from atom_patches.kernels.mla_attention.layout import Layout, layout_of
from atom_patches.kernels.registry import YES, Verdict, no

from ._scale import one

LATENT, ROPE, PAGE = 512, 64, 64
#: With more rows than this the packed kernel is given them as one sequence, as the backend does with a prefill.
MOST_SEQUENCES = 256
_CACHE_DTYPE = {Layout.PLAIN: "auto", Layout.SCALED: "fp8", Layout.PACKED: "fp8_ds_mla"}


def available() -> Verdict:
    return YES if current_platform.is_cuda() else no("vLLM brings FlashMLA with it on NVIDIA GPUs only")


def supports_mla_attention(
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
) -> Verdict:
    supported, reason = flashmla.is_flashmla_dense_supported()
    if not supported:
        return no(reason or "FlashMLA's dense kernel does not run here")
    if q.dtype not in (torch.bfloat16, torch.float16) or cache.dtype != q.dtype:
        return no(
            f"queries of {q.dtype} over a cache of {cache.dtype}: with FP8, FlashMLA wants the queries in FP8 too"
        )
    if seq_lens_k.shape[0] == 0 or max_seqlen_q != 1 or q.shape[0] != seq_lens_k.shape[0]:
        # More than one would have to be as many in every sequence, which the bound max_seqlen_q does not say.
        return no("FlashMLA is bound for decode, one query of every sequence")
    if any(x.dtype != torch.int32 for x in (block_table, seq_lens_k)) or not block_table.is_contiguous():
        return no("FlashMLA takes contiguous indices of int32")
    return _shapes(q, cache, value_size)


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
    plan, _ = flashmla.get_mla_metadata()
    out, lse = flashmla.flash_mla_with_kvcache(
        q=q.unflatten(0, (seq_lens_k.shape[0], max_seqlen_q)),
        k_cache=cache.unsqueeze(-2),
        block_table=block_table,
        cache_seqlens=seq_lens_k,
        head_dim_v=value_size,
        tile_scheduler_metadata=plan,
        softmax_scale=scale,
        causal=True,
        is_fp8_kvcache=False,
    )
    return out.flatten(0, 1), _negative(lse.transpose(1, 2).flatten(0, 1))


def supports_sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> Verdict:
    supported, reason = flashmla.is_flashmla_sparse_supported()
    if not supported:
        return no(reason or "FlashMLA's sparse kernels do not run here")
    if q.dtype != torch.bfloat16:
        return no(f"queries of {q.dtype}; FlashMLA's sparse kernels take bfloat16")
    layout = layout_of(cache, value_size, q.shape[2] - value_size)
    if layout is Layout.SCALED or (layout is Layout.PLAIN and cache.dtype != q.dtype):
        return no(f"a {layout.value} cache of {cache.dtype}; FlashMLA's sparse kernels take bfloat16 or packed rows")
    if not q.shape[0] or not indices.shape[1] or indices.shape[1] % 128:
        return no(f"{indices.shape[1]} slots for each of {q.shape[0]} queries; a multiple of 128 is needed")
    if indices.dtype != torch.int32 or not indices.is_contiguous():
        return no("FlashMLA takes contiguous indices of int32")
    if q.shape[1] > 128:
        return no(f"{q.shape[1]} heads; at most 128")
    return _shapes(q, cache, value_size)


def sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> tuple[Tensor, Tensor]:
    rows, heads = q.shape[:2]
    packed = layout_of(cache, value_size, q.shape[2] - value_size) is Layout.PACKED
    padded = -(-heads // 64) * 64
    if padded != heads:
        wider = q.new_zeros(rows, padded, q.shape[2]) if packed else q.new_empty(rows, padded, q.shape[2])
        wider[:, :heads] = q
        q = wider
    if not packed:
        flat = cache.view(-1, 1, cache.shape[-1])
        out, _, lse = flashmla.flash_mla_sparse_fwd(q, flat, indices[:, None], scale)
        return out[:, :heads].contiguous(), _negative(lse[:, :heads])
    axis = 1 if rows <= MOST_SEQUENCES else 0
    plan, _ = flashmla.get_mla_metadata()
    out, lse = flashmla.flash_mla_with_kvcache(
        q=q.unsqueeze(axis),
        k_cache=cache.view(torch.uint8).unsqueeze(-2),
        block_table=None,
        head_dim_v=value_size,
        cache_seqlens=None,
        tile_scheduler_metadata=plan,
        is_fp8_kvcache=True,
        indices=indices.unsqueeze(axis),
        softmax_scale=scale,
    )
    out, lse = out.squeeze(axis), lse.transpose(1, 2).squeeze(axis)
    return out[:, :heads].contiguous(), _negative(lse[:, :heads])


def supports_mla_cache_write(
    latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None
) -> Verdict:
    if not slots.shape[0]:
        return no("vLLM launches no kernel for zero rows")
    layout = layout_of(cache, latent.shape[1], rope.shape[1])
    if latent.dtype != rope.dtype or (layout is Layout.PLAIN and cache.dtype != latent.dtype):
        return no(f"{latent.dtype} and {rope.dtype} into a cache of {cache.dtype}: vLLM's kernel takes one dtype")
    if slots.dtype != torch.int64 or slots.stride(0) != 1 or latent.stride(1) != 1 or rope.stride(1) != 1:
        return no("vLLM's kernel takes slots of int64 and rows in line")
    if layout is Layout.PACKED:
        if (latent.shape[1], rope.shape[1]) != (LATENT, ROPE) or latent.dtype != torch.bfloat16:
            return no(f"vLLM packs {LATENT} + {ROPE} bfloat16 values only")
        if latent.stride(0) % 8 or latent.data_ptr() % 16 or rope.stride(0) % 2 or rope.data_ptr() % 4:
            return no("vLLM's kernel packs 16 bytes at a time")
    return YES


def mla_cache_write(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None) -> None:
    layout = layout_of(cache, latent.shape[1], rope.shape[1])
    raw = cache if layout is Layout.PLAIN else cache.view(torch.uint8)
    scale = one(cache.device) if cache_scale is None else cache_scale
    ops.concat_and_cache_mla(latent, rope, raw, slots, _CACHE_DTYPE[layout], scale)


def _shapes(q: Tensor, cache: Tensor, value_size: int) -> Verdict:
    if (value_size, q.shape[2]) != (LATENT, LATENT + ROPE):
        return no(f"FlashMLA is for {LATENT} + {ROPE} values, not {value_size} of {q.shape[2]}")
    if cache.shape[1] != PAGE or not cache.is_contiguous() or q.stride(2) != 1:
        return no(f"FlashMLA takes a contiguous cache of blocks of {PAGE}, and queries in line")
    return YES


def _negative(lse: Tensor) -> Tensor:
    return torch.where(lse == math.inf, -math.inf, lse).contiguous()
