"""The sparse indexer in Triton."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
from __future__ import annotations

import torch
import triton
from torch import Tensor

from atom_patches.kernels.launch import backend, converts_e4m3, has_fp8_dot, processors
from atom_patches.kernels.registry import YES, Verdict, no

from . import _kernels, _topk
from .reference import empty_logits, parts_of

LARGEST_SIZE = 256
#: The most values a program of the selection holds.
LARGEST_BLOCK = 8192


def supports_indexer_queries(q: Tensor, gates: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Verdict:
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return no(f"queries of {q.dtype}")
    if not 16 <= q.shape[2] <= LARGEST_SIZE:
        return no(f"heads of {q.shape[2]}; 16 to {LARGEST_SIZE}")
    return YES if q.stride(2) == 1 else no("the values of a query are not next to each other")


def indexer_queries(q: Tensor, gates: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    tokens, heads, size = q.shape
    out = torch.empty(tokens, heads, size, dtype=torch.uint8, device=q.device)
    weights = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if out.numel():
        rows = 16 if tokens * heads <= 16 * 4 * processors(q.device) or size > 128 else 64
        _kernels.queries[(tokens, triton.cdiv(heads, rows))](
            q, gates, cos, sin, out, weights, heads, cos.shape[1], (heads * size) ** -0.5, size**-0.5,
            q.stride(0), q.stride(1), *gates.stride(), *cos.stride(), *sin.stride(),
            INTERLEAVED=interleaved, ROWS=rows, D=size, num_warps=4,
            enable_fp_fusion=False,  # a product that is not rounded before the sum turns to another value of q's dtype
        )  # fmt: skip
    return out.view(torch.float8_e4m3fn), weights


def supports_indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> Verdict:
    if key.shape[1] > 4096:
        return no(f"keys of {key.shape[1]} values; at most 4096")
    return YES


def indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> None:
    count, size = key.shape
    if not count:
        return
    values, scales = _bytes_of(cache)
    rows = 1 if count <= 256 else 8
    _kernels.write[(triton.cdiv(count, rows),)](
        key, slots, values, scales, count, size, *key.stride(), slots.stride(0), values.stride(0), scales.stride(0),
        PAGE=cache.shape[1], POWER_OF_TWO=power_of_two, ROWS=rows, COLUMNS=triton.next_power_of_2(size),
        num_warps=1 if rows == 1 else 4,
    )  # fmt: skip


def indexer_cache_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    values, scales = _bytes_of(cache)
    size = values.shape[2]
    key = torch.empty(total, size, dtype=torch.uint8, device=cache.device)
    key_scale = torch.empty(total, dtype=torch.float32, device=cache.device)
    if total:
        rows = 32
        _kernels.gather[(triton.cdiv(total, rows),)](
            values, scales, block_table, cu_seqlens_k.contiguous(), key, key_scale, total, block_table.shape[0], size,
            *block_table.stride(), values.stride(0), scales.stride(0),
            PAGE=cache.shape[1], ROWS=rows, COLUMNS=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return key.view(torch.float8_e4m3fn), key_scale


def supports_indexer_logits(
    q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor
) -> Verdict:
    if key.stride(1) != 1:
        return no("the values of a key are not next to each other")
    return _queries(q)


def indexer_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    tokens, heads, size = q.shape
    columns = key.shape[0]
    logits = empty_logits(tokens, columns, q.device)
    if not logits.numel():
        return logits
    keys, together, warps, stages = _ragged_config()
    _kernels.logits_ragged[(triton.cdiv(columns, keys), triton.cdiv(tokens, together))](
        q.view(torch.uint8), key.view(torch.uint8), key_scale, weights, start, end, logits,
        tokens, columns, heads, size, q.stride(0), q.stride(1), key.stride(0), key_scale.stride(0), *weights.stride(),
        start.stride(0), end.stride(0), logits.stride(0),
        FP8=has_fp8_dot(), KEYS=keys, TOKENS=together, H=_padded(heads), D=_padded(size), STAGES=stages,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return logits


def supports_indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Verdict:
    return _queries(q)


def indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Tensor:
    tokens, heads, size = q.shape
    logits = torch.empty(tokens, max_seqlen_k, dtype=torch.float32, device=q.device)
    if not logits.numel():
        return logits
    values, scales = _bytes_of(cache)
    keys, programs, warps, stages = _paged_config()
    parts = max(1, min(triton.cdiv(max_seqlen_k, keys), programs * processors(q.device) // tokens))
    _kernels.logits_paged[(tokens, parts)](
        q.view(torch.uint8), values, scales, weights, block_table, requests, lengths, logits,
        max_seqlen_k, heads, size, q.stride(0), q.stride(1), *weights.stride(), *block_table.stride(),
        0 if requests is None else requests.stride(0), lengths.stride(0), values.stride(0), scales.stride(0),
        HAS_REQUESTS=requests is not None, FP8=has_fp8_dot(), PAGE=cache.shape[1], KEYS=keys, H=_padded(heads),
        D=_padded(size), STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return logits


def supports_topk_indices(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Verdict:
    if logits.dtype != torch.float32:
        return no(f"logits of {logits.dtype}; float32 only")
    if 2 * k > LARGEST_BLOCK:
        return no(f"k = {k}; at most {LARGEST_BLOCK // 2}")
    return YES


def topk_indices(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Tensor:
    rows, columns = logits.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if not rows:
        return out
    block, warps = _select_config(k, columns)
    step = block - k
    parts = _parts(columns, k, step, processors(logits.device) // rows)
    strides = (*logits.stride(), 0 if start is None else start.stride(0), end.stride(0))
    meta = {"HAS_START": start is not None, "BLOCK": block, "num_warps": warps}
    if parts == 1:
        _topk.select[(rows, 1)](logits, out, start, end, out, k, step, *strides, 1, MERGE=False, **meta)
        return out
    found = torch.empty(rows, parts, k, dtype=torch.int32, device=logits.device)
    _topk.select[(rows, parts)](logits, found, start, end, found, k, step, *strides, parts, MERGE=False, **meta)
    _topk.select[(rows, 1)](logits, found, start, end, out, k, step, *strides, parts, MERGE=True, **meta)
    return out


def local_to_paged(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Tensor:
    rows, top_k = indices.shape
    out = torch.empty(rows, top_k, dtype=torch.int32, device=indices.device)
    if not out.numel():
        return out
    width = min(1024, max(16, triton.next_power_of_2(top_k)))
    _kernels.local_to_paged[(rows, triton.cdiv(top_k, width))](
        indices, requests, block_table, out, top_k, block_table.shape[1], *indices.stride(),
        0 if requests is None else requests.stride(0), *block_table.stride(),
        HAS_REQUESTS=requests is not None, PAGE=block_size, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def _ragged_config() -> tuple[int, int, int, int]:
    """Keys and queries of a program, its warps and its stages."""
    return (128, 16, 4, 2) if backend() == "cuda" else (32, 4, 4, 1)


def _paged_config() -> tuple[int, int, int, int]:
    """Keys of a tile, programs for every processor, warps and stages."""
    return (64, 8, 4, 3) if backend() == "cuda" else (32, 8, 4, 1)


def _select_config(k: int, columns: int) -> tuple[int, int]:
    """Values that a program holds, at least 2 k if there are as many, and its warps."""
    block = min(LARGEST_BLOCK, max(16, triton.next_power_of_2(k + max(k, columns))))
    return block, max(4, min(16, block // 1024))


def _parts(columns: int, k: int, step: int, most: int) -> int:
    """Into how many parts a row is cut: as few steps as possible, one after the other, of a part and of the merge."""

    def steps(parts: int) -> int:
        merged = triton.cdiv(parts * k, step) if parts > 1 else 0
        return triton.cdiv(triton.cdiv(columns, parts), step) + merged

    return min(range(1, max(1, min(most, triton.cdiv(columns, step))) + 1), key=steps)


def _queries(q: Tensor) -> Verdict:
    if q.dtype != torch.float8_e4m3fn:
        return no(f"queries of {q.dtype}; float8_e4m3fn only")
    if not converts_e4m3():
        return no("Triton reads E4M3 from compute capability 8.9 on")
    if q.stride(2) != 1:
        return no("the values of a query are not next to each other")
    if q.shape[2] > LARGEST_SIZE or q.shape[1] > 128:
        return no(f"{q.shape[1]} heads of {q.shape[2]}; at most 128 of {LARGEST_SIZE}")
    return YES


def _bytes_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The cache's values as bytes and its scales."""
    values, scales = parts_of(cache)
    return values.view(torch.uint8), scales


def _padded(size: int) -> int:
    """What a dimension of a matrix product is filled up to; FP8 takes at least 32 values at once."""
    return max(32, triton.next_power_of_2(size))
