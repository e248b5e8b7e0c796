"""SGLang's sparse indexer on NVIDIA GPUs: its gathering, selection and mapping kernels, and DeepGEMM for the logits.

SGLang's kernels that write keys skip no row, padding goes to a slot of its own there: they are not bound. The plan of
the paged logits is made in every call here, by SGLang once a step for all layers.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import NamedTuple

import torch
from sgl_kernel import fast_topk_v2
from sglang.kernels.ops.attention.dsa.index_buf_accessor import GetKAndS
from sglang.kernels.ops.attention.dsa.transform_index import transform_index_page_table_decode
from sglang.srt.layers.deep_gemm_wrapper import ENABLE_JIT_DEEPGEMM
from sglang.srt.utils import is_cuda
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.sparse_indexer.deep_gemm import PAGE, SIZE, in_rows, takes_logits, takes_paged_logits

if ENABLE_JIT_DEEPGEMM:
    import deep_gemm

SELECTED = 2048
LARGEST_CACHE = 2**31


def available() -> Verdict:
    return YES if is_cuda() else no("SGLang's indexer kernels are bound on NVIDIA GPUs only")


class _Pool(NamedTuple):
    """What SGLang's accessor asks its pool."""

    page_size: int
    index_head_dim: int


def supports_indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> Verdict:
    if not total:
        return no("SGLang launches no kernel for zero rows")
    if cache.shape[2] != SIZE + 4 or not cache.is_contiguous() or not block_table.is_contiguous():
        return no(f"SGLang's kernel takes a contiguous cache of keys of {SIZE} values, and a contiguous block table")
    if cache.numel() > LARGEST_CACHE:
        return no("SGLang's kernel counts the cache's bytes in 32 bits")
    return YES


def indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    page = cache.shape[1]
    key, scale = GetKAndS.triton(
        _Pool(page, SIZE),
        cache.view(torch.uint8).flatten(1),
        page_indices=block_table,
        seq_len_tensor=cu_seqlens_k.diff(),
        seq_len_sum=total,
        max_seq_len=min(total, block_table.shape[1] * page),
    )
    return key.view(torch.float8_e4m3fn), scale.view(torch.float32).squeeze(-1)


def supports_indexer_logits(
    q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor
) -> Verdict:
    found = _deep_gemm()
    return takes_logits(q, key, key_scale, weights, start, end) if found.ok else found


def indexer_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    found = deep_gemm.fp8_mqa_logits(q, (key, key_scale), weights, start, end, clean_logits=False)
    return in_rows(found, q.shape[0], key.shape[0])


def supports_indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Verdict:
    found = _deep_gemm()
    if not found.ok:
        return found
    return takes_paged_logits(q, cache, weights, block_table, requests, lengths, max_seqlen_k)


def indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Tensor:
    seen = lengths.unsqueeze(-1)
    plan = deep_gemm.get_paged_mqa_logits_metadata(seen, PAGE, deep_gemm.get_num_sms())
    found = deep_gemm.fp8_paged_mqa_logits(
        q.unsqueeze(1),
        cache.view(torch.uint8).unsqueeze(-2),
        weights,
        seen,
        block_table[: q.shape[0]],
        plan,
        max_seqlen_k,
        clean_logits=False,
    )
    return found.contiguous()


def supports_topk_indices(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Verdict:
    if stable:
        return no("SGLang's kernel does not say which of equal logits it takes")
    if k != SELECTED:
        return no(f"SGLang's kernel selects {SELECTED}, not {k}")
    if not logits.numel():
        return no("SGLang launches no kernel for zero rows")
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not end.is_contiguous():
        return no("SGLang's kernel takes rows of float32 in line")
    if end.dtype != torch.int32 or (start is not None and (start.dtype != torch.int32 or not start.is_contiguous())):
        return no("SGLang's kernel takes contiguous ranges of int32")
    return YES


def topk_indices(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Tensor:
    lengths = end if start is None else end - start
    return fast_topk_v2(logits, lengths, k, row_starts=start)


def supports_local_to_paged(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Verdict:
    if block_size != 1 or requests is not None:
        return no("SGLang's kernel takes a table of single tokens with a row for every query")
    if not indices.shape[0] or indices.shape[1] != SELECTED or not block_table.shape[1]:
        return no(f"SGLang's kernel maps {SELECTED} positions of each row")
    if any(x.dtype != torch.int32 or x.stride(1) != 1 for x in (indices, block_table)):
        return no("SGLang's kernel takes rows of int32 in line")
    return YES if indices.is_contiguous() else no("SGLang's kernel takes contiguous positions")


def local_to_paged(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Tensor:
    """Positions beyond the table, which SGLang does not expect, are taken out before."""
    inside = torch.where(indices < block_table.shape[1], indices, -1)
    return timed_local_to_paged(inside, requests, block_table, block_size)


def timed_local_to_paged(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Tensor:
    """What SGLang itself runs."""
    return transform_index_page_table_decode(page_table=block_table[: indices.shape[0]], topk_indices=indices)


def _deep_gemm() -> Verdict:
    if not ENABLE_JIT_DEEPGEMM:
        return no("SGLang found no DeepGEMM, or none for this GPU")
    return YES
