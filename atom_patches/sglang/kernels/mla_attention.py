"""SGLang's latent attention on NVIDIA GPUs: FlashMLA, whose kernels its FlashMLA and DSA backends call.

SGLang's kernels that write the cache skip no row, padding goes to a slot of its own there: they are not bound. FlashMLA
plans the split over keys in its first call with a plan object; here every call has its own. A query without keys has
+inf for its log-sum-exp there, and -inf here; the kernel for sparse attention over bfloat16 counts it in powers of two.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import math

import torch
from sgl_kernel import flash_mla
from sglang.srt.utils import is_cuda
from torch import Tensor

from atom_patches.kernels.mla_attention.layout import Layout, layout_of
from atom_patches.kernels.registry import YES, Verdict, no

LATENT, ROPE, PAGE = 512, 64, 64
#: FlashMLA's kernels for Hopper take heads in blocks of 64.
BLOCK_HEADS = 64


def available() -> Verdict:
    return YES if is_cuda() else no("SGLang brings FlashMLA with it on NVIDIA GPUs only")


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
    if q.dtype not in (torch.bfloat16, torch.float16) or cache.dtype != q.dtype:
        return no(f"queries of {q.dtype} over a cache of {cache.dtype}: FlashMLA is bound for one half precision")
    if seq_lens_k.shape[0] == 0 or max_seqlen_q != 1 or q.shape[0] != seq_lens_k.shape[0]:
        return no("FlashMLA is bound for decode, one query of every sequence")
    if any(x.dtype != torch.int32 for x in (block_table, seq_lens_k)) or not block_table.is_contiguous():
        return no("FlashMLA takes contiguous indices of int32")
    if cache.shape[1] != PAGE:
        return no(f"FlashMLA takes blocks of {PAGE} tokens, not {cache.shape[1]}")
    return _fits("dense_decode_fwd", q, cache, value_size)


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
    plan, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=q.unsqueeze(1),
        k_cache=cache.unsqueeze(-2),
        block_table=block_table,
        cache_seqlens=seq_lens_k,
        head_dim_v=value_size,
        tile_scheduler_metadata=plan,
        softmax_scale=scale,
        causal=True,
    )
    return out.squeeze(1), _negative(lse.squeeze(2))


def supports_sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> Verdict:
    if q.dtype != torch.bfloat16:
        return no(f"queries of {q.dtype}; FlashMLA's sparse kernels take bfloat16")
    layout = layout_of(cache, value_size, q.shape[2] - value_size)
    if layout is Layout.SCALED or (layout is Layout.PLAIN and cache.dtype != q.dtype):
        return no(f"a {layout.value} cache of {cache.dtype}; FlashMLA's sparse kernels take bfloat16 or packed rows")
    if layout is Layout.PACKED and cache.shape[1] != PAGE:
        return no(f"FlashMLA takes packed rows in blocks of {PAGE}, not {cache.shape[1]}")
    if not q.shape[0] or not indices.shape[1] or indices.shape[1] % 128:
        return no(f"{indices.shape[1]} slots for each of {q.shape[0]} queries; a multiple of 128 is needed")
    if indices.dtype != torch.int32 or not indices.is_contiguous():
        return no("FlashMLA takes contiguous indices of int32")
    if q.shape[1] > 128:
        return no(f"{q.shape[1]} heads; at most 128")
    return _fits("sparse_decode_fwd" if layout is Layout.PACKED else "sparse_prefill_fwd", q, cache, value_size)


def sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    packed = layout_of(cache, value_size, q.shape[2] - value_size) is Layout.PACKED
    wider = _whole_blocks_of_heads(q)
    if packed:
        plan, _ = flash_mla.get_mla_metadata()
        out, lse = flash_mla.flash_mla_with_kvcache(
            q=wider.unsqueeze(1),
            k_cache=cache.view(torch.uint8).unsqueeze(-2),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=value_size,
            tile_scheduler_metadata=plan,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=indices.unsqueeze(1),
        )
        out, lse = out.squeeze(1), lse.squeeze(2)
    else:
        rows = cache.view(-1, 1, cache.shape[2])
        out, _, in_twos = flash_mla.flash_mla_sparse_fwd(wider, rows, indices.unsqueeze(1), scale, value_size)
        lse = in_twos * math.log(2)
    return out[:, :heads].contiguous(), _negative(lse[:, :heads])


def _whole_blocks_of_heads(q: Tensor) -> Tensor:
    heads = q.shape[1]
    padded = -(-heads // BLOCK_HEADS) * BLOCK_HEADS
    if padded == heads:
        return q.contiguous()
    wider = q.new_zeros(q.shape[0], padded, q.shape[2])
    wider[:, :heads] = q
    return wider


def _fits(kernel: str, q: Tensor, cache: Tensor, value_size: int) -> Verdict:
    if not hasattr(torch.ops.sgl_kernel, kernel):
        return no(f"this sgl_kernel comes without FlashMLA's {kernel}")
    if (value_size, q.shape[2]) != (LATENT, LATENT + ROPE):
        return no(f"FlashMLA is for {LATENT} + {ROPE} values, not {value_size} of {q.shape[2]}")
    if not cache.is_contiguous() or q.stride(2) != 1:
        return no("FlashMLA takes a contiguous cache, and queries in line")
    return YES


def _negative(lse: Tensor) -> Tensor:
    return torch.where(lse == math.inf, -math.inf, lse).contiguous()
