"""Latent attention by AITER's assembly kernels; never run on AMD hardware.

`mla_decode_fwd` is called as engines call it: the cache seen as pages of one token, the tokens that a query sees listed
one behind the other, one query row a sequence. That list is made here for every call, on the device and for the longest
that it can be, T * max_seqlen_k entries: an engine that makes it once a step is better off. bfloat16 throughout, 16 or
128 heads, and DeepSeek's 512 + 64 values, because only those have kernels. A query that sees nothing is set here.

The FP8 layouts are refused: AITER's FP8 kernels want FP8 queries and a plan made beforehand, and its cache write does
not say whether it saturates.

Called as in AITER's `op_tests/test_concat_cache_mla.py` and vLLM's `vllm/_aiter_ops.py`; function and commit are in
`call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.aiter_binding import Function
from atom_patches.kernels.registry import Verdict, no

DECODE = Function(
    "aiter.mla:mla_decode_fwd",
    (
        "q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q",
    ),
    ("sm_scale", "return_lse"),
    call_site="vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: _rocm_aiter_mla_decode_fwd_impl",
)  # fmt: skip
WRITE = Function(
    "aiter.ops.cache:concat_and_cache_mla",
    ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale"),
    call_site="ROCm/aiter 0590d9a96e6d op_tests/test_concat_cache_mla.py: run_aiter",
)
HEADS = (16, 128)
LATENT, ROPE = 512, 64


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
    if max_seqlen_q > 1:
        return no("bound for decode: the list of tokens of every row of a prefill would be too long")
    return _refusal(q, cache, value_size) or DECODE.verdict()


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
    rows, seqs, page = q.shape[0], seq_lens_k.shape[0], cache.shape[1]
    if not rows or not seqs or not max_seqlen_k or not block_table.shape[1]:
        return _nothing(q, value_size)
    row = torch.arange(rows, dtype=cu_seqlens_q.dtype, device=q.device)
    owner = (torch.searchsorted(cu_seqlens_q.contiguous(), row, right=True) - 1).clamp_(max=seqs - 1)
    lengths = seq_lens_k[owner].masked_fill(row >= cu_seqlens_q[-1], 0)
    place = torch.arange(max_seqlen_k, device=q.device)
    block = (place // page).clamp_(max=block_table.shape[1] - 1)
    slots = block_table[owner][:, block] * page + (place % page).to(block_table.dtype)
    return _attend(q, cache, slots, place[None] < lengths[:, None], scale, value_size)


def supports_sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> Verdict:
    return _refusal(q, cache, value_size) or DECODE.verdict()


def sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> tuple[Tensor, Tensor]:
    if not q.shape[0] or not indices.shape[1]:
        return _nothing(q, value_size)
    return _attend(q, cache, indices, indices >= 0, scale, value_size)


def supports_mla_cache_write(
    latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None
) -> Verdict:
    if cache.dtype not in (torch.bfloat16, torch.float16) or not cache.dtype == latent.dtype == rope.dtype:
        return no(f"bound for one dtype of 16 bits, not {latent.dtype} and {rope.dtype} into {cache.dtype}")
    if cache.stride(2) != 1 or latent.shape[1] % 8 or rope.shape[1] % 8 or not _aligned(cache):
        return no("AITER writes 16 bytes at once: sizes, strides and addresses must be multiples of that")
    return WRITE.verdict()


def mla_cache_write(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None) -> None:
    if slots.shape[0]:
        one = torch.ones(1, dtype=torch.float32, device=cache.device)
        WRITE(_dense(latent), _dense(rope), cache, slots.to(torch.int64).contiguous(), "auto", one)


def _refusal(q: Tensor, cache: Tensor, value_size: int) -> Verdict | None:
    if q.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16:
        return no(f"bound for bfloat16, not queries of {q.dtype} with a cache of {cache.dtype}")
    if q.shape[1] not in HEADS:
        return no(f"AITER has kernels for {' and '.join(map(str, HEADS))} heads, not {q.shape[1]}")
    if (q.shape[2], value_size) != (LATENT + ROPE, LATENT):
        return no(f"AITER's kernels are for {LATENT} + {ROPE} values, not {value_size} of {q.shape[2]}")
    if not cache.is_contiguous():
        return no("AITER sees the cache as one list of tokens; its blocks must be contiguous")
    return None


def _attend(
    q: Tensor, cache: Tensor, slots: Tensor, seen: Tensor, scale: float, value_size: int
) -> tuple[Tensor, Tensor]:
    """Attend from row t to those of the tokens slots[t] that are seen."""
    rows = q.shape[0]
    lengths = seen.sum(1, dtype=torch.int32)
    bounds = torch.zeros(rows + 1, dtype=torch.int32, device=q.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=bounds[1:])
    places = torch.zeros(seen.numel() + 1, dtype=torch.int32, device=q.device)
    # What is not seen goes to one more entry, behind the list.
    target = (bounds[:-1, None] + seen.cumsum(1) - 1).masked_fill_(~seen, seen.numel())
    places.scatter_(0, target.flatten().long(), slots.to(torch.int32).flatten())
    out = q.new_empty(rows, q.shape[1], value_size)
    _, lse = DECODE(
        q.contiguous(),
        cache.view(-1, 1, 1, cache.shape[2]),
        out,
        torch.arange(rows + 1, dtype=torch.int32, device=q.device),
        bounds,
        places,
        torch.ones(rows, dtype=torch.int32, device=q.device),
        1,
        sm_scale=scale,
        return_lse=True,
    )
    blind = lengths == 0
    return out.masked_fill_(blind[:, None, None], 0.0), lse.masked_fill(blind[:, None], -torch.inf)


def _nothing(q: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
    out = torch.zeros((*q.shape[:2], value_size), dtype=q.dtype, device=q.device)
    return out, torch.full(q.shape[:2], -torch.inf, device=q.device)


def _aligned(x: Tensor) -> bool:
    return not x.data_ptr() % 16 and not any(s * x.element_size() % 16 for s in x.stride()[:-1])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and _aligned(x) else x.contiguous().clone()
