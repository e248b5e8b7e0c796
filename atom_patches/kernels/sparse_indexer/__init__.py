"""DeepSeek-V3.2's lightning indexer: which past tokens each query attends to.

Every token has one small key, kept in FP8. A query scores all of them with H small heads,

    logit[t, s] = key_scale[s] * sum_h weights[t, h] * relu(q[t, h] . key[s]),

and the k largest name the tokens for the sparse attention. Everything that is constant along s (the scale of q in
FP8, the softmax scale) is already inside `weights`.

Schema, T queries, H heads, D values a head, B blocks of P tokens, M blocks a request at most:

    q             [T, H, D]       float8_e4m3fn
    weights       [T, H]          float32
    cache         [B, P, D + 4]   uint8 (or float8_e4m3fn, as bytes): a block is P rows of D E4M3 values, then P float32
                                  scales; bytes of a block are dense, blocks may be strided by a multiple of 4 bytes
    block_table   [any, M]        int32: token p of request i lies in block block_table[i, p // P]
    requests      [T] int32       the request of each query, negative for padding; None: query t is request t's

    indexer_queries       q of a floating dtype, any strides with the last one 1; gates [T, H], what the checkpoint says
                          of each head's weight; cos, sin [T, R / 2], by which the first R values of each head are
                          turned, pairs half of R apart or, `interleaved`, neighbours. Turned, rounded to q's dtype;
                          mixed by the orthonormal Hadamard transform (Sylvester's order), which leaves products as they
                          are; divided by scale = max(|mixed|, 1e-4) / 448, rounded up to a power of two. Returns q in
                          float8_e4m3fn and weights = gates * scale * (H * D) ** -0.5.
    indexer_cache_write   key [T, D] (floating) into slots [T] (int32 or int64; negative: skipped; real ones distinct;
                          slot = block * P + place). scale = max(|key|, 1e-4) / 448, if `power_of_two` rounded up to a
                          power of two (UE8M0).
    indexer_cache_gather  the keys of N requests, one behind the other as cu_seqlens_k [N + 1] (int32, from 0) says:
                          key [total, D], key_scale [total] float32; `total` is cu_seqlens_k[N].
    indexer_logits        key [S, D] float8_e4m3fn, key_scale [S] float32; query t sees the columns from start[t] up
                          to end[t] ([T] int32): logits [T, S] float32, whose rows lie `reference.row_pitch(S)` apart.
    indexer_logits_paged  query t sees its request's tokens below lengths[t] ([T] int32): logits [T, max_seqlen_k].
    topk_indices          of each row of logits [T, S] the k largest of the columns from start[t] (None: 0) up to
                          end[t], as int32 [T, k] counted from start[t], ascending, then -1. -inf and NaN are never
                          taken; of equal values the lowest columns are (-0 equals 0). Not `stable`: in any order; any
                          of the equal ones at the border may be taken, and -inf and NaN must not lie in a range.
    local_to_paged        indices [T, any] int32, positions within the request, to slots of the paged cache, int32;
                          -1 where the index is negative (all of them where the request is), and beyond the block table.

What is outside a query's range is never read and need not be written: it may hold anything, NaN and infinities too. Of
padding that is the whole row. `topk_indices` is given the same ranges, so that nobody has to clear the logits first.

Source: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, section 2.1; the cache's layout is DeepGEMM's, as vLLM and SGLang use
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference: sums of H * D exact products, with some freedom for
#: matrix units that keep fewer than 24 bits of a sum of FP8 products.
TOLERANCE = {"float8_e4m3fn": (1e-3, 2e-2), "float32": (0.0, 0.0)}
#: Of queries in E4M3: one step, where a sum lies so near the middle of two values that its order decides.
ONE_STEP = (0.126, 2.0**-9)

_ROWS = (1, 4, 16, 64, 256, 4096)
_COLUMNS = (4096, 16384, 65536, 131072)


def _fake_queries(q: Tensor, gates: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), q.new_empty(q.shape[:2], dtype=torch.float32)


def _queries_class(q: Tensor, gates: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> str:
    return f"{dtype_name(q.dtype)} h{q.shape[1]} d{q.shape[2]} rows{bucket(q.shape[0], _ROWS)}"


INDEXER_QUERIES = Operation(
    package=__name__,
    name="indexer_queries",
    schema="(Tensor q, Tensor gates, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
    reference=reference.indexer_queries,
    fake=_fake_queries,
    shape_class=_queries_class,
    tolerance={"float32": ONE_STEP, "bfloat16": ONE_STEP, "float16": ONE_STEP},
)


def indexer_queries(
    q: Tensor, gates: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn, mix and quantise queries.

    Returns:
        (q [T, H, D] float8_e4m3fn, weights [T, H] float32).

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check_queries(q, gates)
    if q.shape[2] & (q.shape[2] - 1):
        raise ValueError(f"the Hadamard transform takes heads of a power of two, got {q.shape[2]}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != q.shape[0] or 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(f"cos and sin [{q.shape[0]}, at most {q.shape[2] // 2}], got {list(cos.shape)} and "
                         f"{list(sin.shape)}")  # fmt: skip
    return INDEXER_QUERIES(q, gates, cos, sin, interleaved)


def _fake_write(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> None:
    return None


def _write_class(key: Tensor, slots: Tensor, cache: Tensor, power_of_two: bool) -> str:
    return f"{dtype_name(key.dtype)} d{key.shape[1]} rows{bucket(key.shape[0], _ROWS)}"


INDEXER_CACHE_WRITE = Operation(
    package=__name__,
    name="indexer_cache_write",
    schema="(Tensor key, Tensor slots, Tensor(a!) cache, bool power_of_two) -> ()",
    reference=reference.indexer_cache_write,
    fake=_fake_write,
    shape_class=_write_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)


def indexer_cache_write(key: Tensor, slots: Tensor, cache: Tensor, *, power_of_two: bool = True) -> None:
    """Quantise every token's key into its slot.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check_cache(cache, key.shape[-1])
    if key.dim() != 2 or slots.shape != key.shape[:1]:
        raise ValueError(f"key [T, D] and slots [T] must agree, got {list(key.shape)} and {list(slots.shape)}")
    INDEXER_CACHE_WRITE(key, slots, cache, power_of_two)


def _fake_gather(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    key = cache.new_empty(total, cache.shape[2] - 4, dtype=torch.float8_e4m3fn)
    return key, cache.new_empty(total, dtype=torch.float32)


def _gather_class(cache: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, total: int) -> str:
    return f"d{cache.shape[2] - 4} tokens{bucket(total, _COLUMNS)}"


INDEXER_CACHE_GATHER = Operation(
    package=__name__,
    name="indexer_cache_gather",
    schema="(Tensor cache, Tensor block_table, Tensor cu_seqlens_k, int total) -> (Tensor, Tensor)",
    reference=reference.indexer_cache_gather,
    fake=_fake_gather,
    shape_class=_gather_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)


def indexer_cache_gather(
    cache: Tensor, block_table: Tensor, *, cu_seqlens_k: Tensor, total: int
) -> tuple[Tensor, Tensor]:
    """Copy the keys of ragged requests out of the paged cache.

    Returns:
        (key [total, D], key_scale [total]).

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check_cache(cache, cache.shape[-1] - 4)
    if block_table.dim() != 2 or cu_seqlens_k.shape != (block_table.shape[0] + 1,):
        raise ValueError(
            f"block_table [N, any] and cu_seqlens_k [N + 1] must agree, got {list(block_table.shape)} and "
            f"{list(cu_seqlens_k.shape)}"
        )
    return INDEXER_CACHE_GATHER(cache, block_table, cu_seqlens_k, total)


def _fake_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], reference.row_pitch(key.shape[0]), dtype=torch.float32)[:, : key.shape[0]]


def _outside_ranges(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    column = torch.arange(key.shape[0], device=q.device)
    return (column < start[:, None]) | (column >= end[:, None])


def _logits_class(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> str:
    rows, columns = bucket(q.shape[0], _ROWS), bucket(key.shape[0], _COLUMNS)
    return f"h{q.shape[1]} d{q.shape[2]} rows{rows} k{columns}"


INDEXER_LOGITS = Operation(
    package=__name__,
    name="indexer_logits",
    schema="(Tensor q, Tensor key, Tensor key_scale, Tensor weights, Tensor start, Tensor end) -> Tensor",
    reference=reference.indexer_logits,
    fake=_fake_logits,
    shape_class=_logits_class,
    tolerance=TOLERANCE,
    unspecified=_outside_ranges,
)


def indexer_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, *, start: Tensor, end: Tensor) -> Tensor:
    """Score gathered keys: logits [T, S], anything outside each query's range.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check_queries(q, weights)
    if key.dim() != 2 or key.shape[1] != q.shape[2] or key_scale.shape != key.shape[:1]:
        raise ValueError(f"key [S, {q.shape[2]}] and key_scale [S], got {list(key.shape)} and {list(key_scale.shape)}")
    if start.shape != q.shape[:1] or end.shape != q.shape[:1]:
        raise ValueError(f"start and end must be [{q.shape[0]}], got {list(start.shape)} and {list(end.shape)}")
    return INDEXER_LOGITS(q, key, key_scale, weights, start, end)


def _fake_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Tensor:
    return q.new_empty(q.shape[0], max_seqlen_k, dtype=torch.float32)


def _beyond_lengths(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Tensor:
    seen = lengths if requests is None else lengths.masked_fill(requests < 0, 0)
    return torch.arange(max_seqlen_k, device=q.device) >= seen[:, None]


def _paged_class(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> str:
    rows, columns = bucket(q.shape[0], _ROWS), bucket(max_seqlen_k, _COLUMNS)
    return f"h{q.shape[1]} d{q.shape[2]} page{cache.shape[1]} rows{rows} k{columns}"


INDEXER_LOGITS_PAGED = Operation(
    package=__name__,
    name="indexer_logits_paged",
    schema=(
        "(Tensor q, Tensor cache, Tensor weights, Tensor block_table, Tensor? requests, Tensor lengths, "
        "int max_seqlen_k) -> Tensor"
    ),
    reference=reference.indexer_logits_paged,
    fake=_fake_paged,
    shape_class=_paged_class,
    tolerance=TOLERANCE,
    reference_reads=True,
    unspecified=_beyond_lengths,
)


def indexer_logits_paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    *,
    lengths: Tensor,
    max_seqlen_k: int,
    requests: Tensor | None = None,
) -> Tensor:
    """Score the keys of each query's request where they lie: logits [T, max_seqlen_k], anything from lengths[t] on.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check_queries(q, weights)
    _check_cache(cache, q.shape[2])
    _check_requests(q.shape[0], block_table, requests)
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"lengths must be [{q.shape[0]}], got {list(lengths.shape)}")
    return INDEXER_LOGITS_PAGED(q, cache, weights, block_table, requests, lengths, max_seqlen_k)


def _fake_topk(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], k, dtype=torch.int32)


def _topk_class(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> str:
    rows, columns = bucket(logits.shape[0], _ROWS), bucket(logits.shape[1], _COLUMNS)
    return f"k{k} rows{rows} columns{columns}"


def _any_order(logits: Tensor, start: Tensor | None, end: Tensor, k: int, stable: bool) -> bool:
    return not stable


TOPK_INDICES = Operation(
    package=__name__,
    name="topk_indices",
    schema="(Tensor logits, Tensor? start, Tensor end, int k, bool stable) -> Tensor",
    reference=reference.topk_indices,
    fake=_fake_topk,
    shape_class=_topk_class,
    tolerance=TOLERANCE,
    unordered=_any_order,
)


def topk_indices(logits: Tensor, *, end: Tensor, k: int, start: Tensor | None = None, stable: bool = True) -> Tensor:
    """The columns of each row's k largest logits: [T, k] int32, if `stable` ascending, then -1.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    if logits.dim() != 2 or any(t is not None and t.shape != logits.shape[:1] for t in (start, end)) or k < 1:
        shapes = [None if t is None else list(t.shape) for t in (logits, start, end)]
        raise ValueError(f"logits [T, S], start [T] or None, end [T] and k > 0, got {shapes} and {k}")
    return TOPK_INDICES(logits, start, end, k, stable)


def _fake_local(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> Tensor:
    return indices.new_empty(indices.shape, dtype=torch.int32)


def _local_class(indices: Tensor, requests: Tensor | None, block_table: Tensor, block_size: int) -> str:
    return f"k{indices.shape[1]} rows{bucket(indices.shape[0], _ROWS)}"


LOCAL_TO_PAGED = Operation(
    package=__name__,
    name="local_to_paged",
    schema="(Tensor indices, Tensor? requests, Tensor block_table, int block_size) -> Tensor",
    reference=reference.local_to_paged,
    fake=_fake_local,
    shape_class=_local_class,
    tolerance=TOLERANCE,
)
OPERATIONS = (
    INDEXER_QUERIES,
    INDEXER_CACHE_WRITE,
    INDEXER_CACHE_GATHER,
    INDEXER_LOGITS,
    INDEXER_LOGITS_PAGED,
    TOPK_INDICES,
    LOCAL_TO_PAGED,
)


def local_to_paged(indices: Tensor, block_table: Tensor, *, block_size: int, requests: Tensor | None = None) -> Tensor:
    """Positions within each query's request to slots of the paged cache.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    if indices.dim() != 2:
        raise ValueError(f"indices must be [T, any], got {list(indices.shape)}")
    _check_requests(indices.shape[0], block_table, requests)
    return LOCAL_TO_PAGED(indices, requests, block_table, block_size)


def _check_queries(q: Tensor, weights: Tensor) -> None:
    if q.dim() != 3 or weights.shape != q.shape[:2]:
        raise ValueError(f"q [T, H, D] and weights [T, H] must agree, got {list(q.shape)} and {list(weights.shape)}")


def _check_cache(cache: Tensor, size: int) -> None:
    if cache.dim() != 3 or cache.element_size() != 1 or cache.shape[2] != size + 4 or size % 4:
        raise ValueError(
            f"cache must be [blocks, block size, {size} + 4] of bytes, {size} a multiple of 4, got "
            f"{list(cache.shape)} of {cache.dtype}"
        )
    if cache.stride(2) != 1 or (cache.shape[1] > 1 and cache.stride(1) != size + 4) or cache.stride(0) % 4:
        raise ValueError(f"blocks of the cache must be dense, got strides {list(cache.stride())}")


def _check_requests(count: int, block_table: Tensor, requests: Tensor | None) -> None:
    if block_table.dim() != 2 or (requests is None and block_table.shape[0] < count):
        raise ValueError(f"block_table must be [requests, any], got {list(block_table.shape)} for {count} queries")
    if requests is not None and requests.shape != (count,):
        raise ValueError(f"requests must be [{count}], got {list(requests.shape)}")


__all__ = [
    "INDEXER_CACHE_GATHER",
    "INDEXER_CACHE_WRITE",
    "INDEXER_LOGITS",
    "INDEXER_LOGITS_PAGED",
    "INDEXER_QUERIES",
    "LOCAL_TO_PAGED",
    "ONE_STEP",
    "OPERATIONS",
    "TOLERANCE",
    "TOPK_INDICES",
    "indexer_cache_gather",
    "indexer_cache_write",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_queries",
    "local_to_paged",
    "topk_indices",
]
