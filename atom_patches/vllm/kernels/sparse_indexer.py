"""vLLM's sparse indexer on NVIDIA GPUs: its cache and selection kernels, and DeepGEMM for the logits.

The plan of the paged logits is made in every call here, by vLLM once a step for all layers. Logits whose rows DeepGEMM
lays out in another way than the operator promises are copied: paged ones of a width that is no multiple of 256.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.utils import deep_gemm
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.sparse_indexer.deep_gemm import PAGE, SIZE, in_rows, takes_logits, takes_paged_logits

#: What vLLM gives its selection to work in.
WORKSPACE = 1 << 20
SELECTED = (512, 1024, 2048)


def available() -> Verdict:
    return YES if current_platform.is_cuda() else no("vLLM's indexer kernels are bound on NVIDIA GPUs only")


def supports_indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> Verdict:
    if not key.shape[0]:
        return no("vLLM launches no kernel for zero rows")
    if key.shape[1] != SIZE or not key.is_contiguous() or not cache.is_contiguous():
        return no(f"vLLM's kernel takes contiguous keys of {SIZE} values and a contiguous cache")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        return no("vLLM's kernel takes slots of int64")
    if key.dtype not in (torch.bfloat16, torch.float16):
        return no(f"keys of {key.dtype}; vLLM's kernel reads four values of 16 bits at once")
    return YES


def indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> None:
    ops.indexer_k_quant_and_cache(key, cache.view(torch.uint8), slots, SIZE, "ue8m0" if power_of_two else "fp32")


def supports_indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> Verdict:
    if not total:
        return no("vLLM launches no kernel for zero rows")
    if cache.shape[2] != SIZE + 4 or not cache.is_contiguous():
        return no(f"vLLM's kernel takes a contiguous cache of keys of {SIZE} values")
    if any(x.dtype != torch.int32 or not x.is_contiguous() for x in (block_table, cu_seqlens_k)):
        return no("vLLM's kernel takes contiguous indices of int32")
    return YES


def indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    key = torch.empty(total, SIZE, dtype=torch.float8_e4m3fn, device=cache.device)
    scale = torch.empty(total, 4, dtype=torch.uint8, device=cache.device)
    ops.cp_gather_indexer_k_quant_cache(cache.view(torch.uint8), key, scale, block_table, cu_seqlens_k)
    return key, scale.view(torch.float32).squeeze(-1)


def supports_indexer_logits(
    q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor
) -> Verdict:
    found = _deep_gemm()
    return takes_logits(q, key, key_scale, weights, start, end) if found.ok else found


def indexer_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    found = deep_gemm.fp8_fp4_mqa_logits((q, None), (key, key_scale), weights, start, end, clean_logits=False)
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
    plan = deep_gemm.get_paged_mqa_logits_metadata(seen, PAGE, num_compute_units(q.device.index or 0))
    found = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q.unsqueeze(1), None),
        cache.view(torch.uint8).unsqueeze(-2),
        weights,
        seen,
        block_table[: q.shape[0]],
        plan,
        max_model_len=max_seqlen_k,
        clean_logits=False,
    )
    return found.contiguous()


def supports_topk_indices(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Verdict:
    if stable:
        return no("vLLM's kernels do not say which of equal logits they take")
    if not logits.numel():
        return no("vLLM launches no kernel for zero rows")
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not end.is_contiguous():
        return no("vLLM's kernels take rows of float32 in line")
    if end.dtype != torch.int32 or (start is not None and (start.dtype != torch.int32 or not start.is_contiguous())):
        return no("vLLM's kernels take contiguous ranges of int32")
    if start is None and (k not in SELECTED or not logits.is_contiguous()):
        return no(f"without a start, vLLM's kernel selects {', '.join(map(str, SELECTED))} of contiguous rows")
    return YES


def topk_indices(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Tensor:
    rows, columns = logits.shape
    found = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if start is None:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=logits.device)
        torch.ops._C.persistent_topk(logits, end, found, workspace, k, columns)
    else:
        torch.ops._C.top_k_per_row_prefill(logits, start, end, found, rows, logits.stride(0), 1, k)
    return found


def supports_local_to_paged(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Verdict:
    if requests is None or not indices.shape[0] or not indices.shape[1] or indices.shape[1] % 128:
        return no("vLLM's kernel takes the request of every query, and a multiple of 128 indices")
    if any(x.dtype != torch.int32 for x in (indices, requests, block_table)):
        return no("vLLM's kernel takes int32")
    return YES


def local_to_paged(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Tensor:
    assert requests is not None
    found = triton_convert_req_index_to_global_index(
        requests, block_table, indices, BLOCK_SIZE=block_size, NUM_TOPK_TOKENS=indices.shape[1]
    )
    assert isinstance(found, Tensor)
    return found


def _deep_gemm() -> Verdict:
    if not deep_gemm.is_deep_gemm_supported():
        return no("DeepGEMM is not installed, or not for this GPU")
    return YES
