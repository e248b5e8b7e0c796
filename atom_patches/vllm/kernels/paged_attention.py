"""vLLM's paged attention on NVIDIA GPUs: FlashAttention, called as its FlashAttention backend calls it.

FlashAttention 3 on Hopper, 2 elsewhere, as the backend chooses. It plans the split over keys inside every call; the
backend does that once a step for all layers. FlashAttention 3 multiplies what lies behind a sequence's end within
its last page by 0: memory there must not hold NaN or infinity.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils

from atom_patches.kernels.registry import YES, Verdict, no


def available() -> Verdict:
    return YES if current_platform.is_cuda() else no("vLLM brings FlashAttention with it on NVIDIA GPUs only")


def supports_paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    query_positions: Tensor | None,
    padded: bool,
) -> Verdict:
    size = q.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return no(f"FlashAttention does not compute in {q.dtype}")
    if key_cache.dtype != q.dtype or k_scale is not None or v_scale is not None:
        return no("with an 8-bit cache FlashAttention rounds the queries to 8 bits too, which is less than asked for")
    if query_positions is not None:
        return no("FlashAttention takes a sequence's query rows for its last ones")
    if size % 8 or size > 256 or value_cache.shape[3] != size:
        return no(f"heads of {size} and {value_cache.shape[3]} values; equal multiples of 8 up to 256 are needed")
    if key_cache.shape[1] % 16:
        return no(f"pages of {key_cache.shape[1]} keys; a multiple of 16 is needed")
    if any(x.stride(-1) != 1 for x in (key_cache, value_cache, block_table, cu_seqlens_q, seq_lens_k)):
        return no("FlashAttention needs the last dimension of the cache and of all indices in line")
    if any(x.dtype != torch.int32 for x in (block_table, cu_seqlens_q, seq_lens_k)):
        return no("FlashAttention takes indices of int32")
    if _version(size) is None:
        return no("vLLM has no FlashAttention for this GPU")
    return YES


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    query_positions: Tensor | None,
    padded: bool,
) -> tuple[Tensor, Tensor]:
    rows, heads, size = q.shape
    if not rows or not seq_lens_k.numel() or not max_seqlen_q or not max_seqlen_k:
        return q.new_zeros(q.shape), _no_keys(rows, heads, q.device)
    version = _version(size)
    out, lse = fa_utils.flash_attn_varlen_func(  # pyright: ignore[reportPrivateImportUsage]
        q=q,
        k=key_cache,
        v=value_cache,
        out=torch.zeros(q.shape, dtype=q.dtype, device=q.device) if padded else q.new_empty(q.shape),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=seq_lens_k,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=scale,
        causal=causal,
        window_size=None if window is None else [window - 1, 0],
        block_table=block_table,
        softcap=soft_cap,
        fa_version=version,
        return_softmax_lse=True,
    )
    if version == 2:
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    if padded:
        lse = lse.masked_fill(torch.arange(rows, device=q.device) >= cu_seqlens_q[-1], -torch.inf)
    return out, lse.mT


@functools.cache
def _version(head_size: int) -> int | None:
    return fa_utils.get_flash_attn_version(head_size=head_size)


def _no_keys(rows: int, heads: int, device: torch.device) -> Tensor:
    return torch.full((heads, rows), -torch.inf, dtype=torch.float32, device=device).mT
