"""Grouped-query attention over a paged key/value cache, for any mix of prefill and decode rows, with log-sum-exp.

Sequence i owns the query rows from cu_seqlens_q[i] up to, not including, cu_seqlens_q[i + 1], and seq_lens_k[i] keys;
key j lies at [block_table[i, j // B], j % B] of the cache. A query row at position p of its sequence attends to

    every key                  without `causal`
    keys j with j <= p         with it, and of those only p - window < j with a `window`

and with c = scale * k_scale, s_j = c * <q, k_j>, after a soft cap s_j := cap * tanh(s_j / cap):

    lse = log(sum_j exp(s_j))        out = v_scale * sum_j exp(s_j - lse) * v_j

A sequence's query rows are its last ones, so row r of R stands at position seq_lens_k[i] - R + r, unless
`query_positions` says where each row stands: a rank of prefill context parallelism runs any rows of a sequence.

Schema, T query rows in N sequences, HQ query and HKV key/value heads (query head h reads head h // (HQ / HKV)):

    q                [T, HQ, D]         float32, bfloat16 or float16
    key_cache        [blocks, B, HKV, D]    q's dtype or an 8-bit float; any B >= 1
    value_cache      [blocks, B, HKV, DV]   the key cache's dtype
    block_table      [N, most blocks]   integers; entries behind a sequence's last block may hold anything
    cu_seqlens_q     [N + 1]            integers from 0, non-decreasing
    seq_lens_k       [N]                integers >= 0
    max_seqlen_q, max_seqlen_k          upper bounds of both, known to the host; they decide how the work is cut
    k_scale, v_scale [1] or [HKV]       float32, or None for 1
    query_positions  [T] integers       negative: a padding row; or None
    out              [T, HQ, DV]        q's dtype, contiguous
    lse              [T, HQ]            float32, the natural logarithm; head-major in memory (strides 1, T)

Any strides are admitted. Sums are taken in float32. A row that no key is visible to has out 0 and lse -inf; so have
rows behind cu_seqlens_q[N], such as a CUDA graph's padding, but only with `padded`: without it there must be none.
What lies in the cache behind a sequence's end, or outside its window, never reaches a result, not even as 0 * NaN.

Source: A. Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762); W. Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", 2023 (arXiv:2309.06180); the blockwise softmax of
T. Dao, "FlashAttention-2", 2023 (arXiv:2307.08691), and its split over keys ("Flash-Decoding", 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference, per query dtype; values are of order 1.
TOLERANCE = {"float32": (1e-5, 1e-5), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)}


def _fake(
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
    rows, heads, _ = q.shape
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device).mT
    return q.new_empty(rows, heads, value_cache.shape[3]), lse


def _shape_class(
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
) -> str:
    dtypes = dtype_name(q.dtype)
    if key_cache.dtype != q.dtype:
        dtypes += f"/{dtype_name(key_cache.dtype)}"
    shape = f"{q.shape[1]}/{key_cache.shape[2]} heads d{q.shape[2]}"
    if max_seqlen_q == 1:
        work = f"decode seqs{bucket(seq_lens_k.numel(), (1, 4, 16, 64))} keys{bucket(max_seqlen_k, (8192, 32768))}"
    else:
        work = f"prefill rows{bucket(q.shape[0], (64, 512, 4096, 16384))} keys{bucket(max_seqlen_k, (8192, 32768))}"
    return f"{dtypes} {shape} {work}"


PAGED_ATTENTION = Operation(
    package=__name__,
    name="paged_attention",
    schema="(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor cu_seqlens_q, "
    "Tensor seq_lens_k, int max_seqlen_q, int max_seqlen_k, float scale, bool causal, int? window, float soft_cap, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? query_positions, bool padded) -> (Tensor, Tensor)",
    reference=reference.paged_attention,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (PAGED_ATTENTION,)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    query_positions: Tensor | None = None,
    padded: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend from ragged query rows to a paged cache.

    Args:
        q, key_cache, value_cache, block_table, cu_seqlens_q, seq_lens_k, max_seqlen_q, max_seqlen_k, k_scale, v_scale:
            as in the package's schema.
        scale: factor of q·k, above 0; usually D ** -0.5.
        causal: whether a row sees only keys up to its own position.
        window: how many keys, its own included, a row sees at most; only with `causal`. None: no limit.
        soft_cap: bound of the logits; 0: none.
        query_positions: position of each row in its sequence; None: the sequence's last ones.
        padded: whether rows may lie behind cu_seqlens_q[N].

    Returns:
        out [T, HQ, DV] in q's dtype and lse [T, HQ] float32.

    Raises:
        ValueError: shapes or options that contradict the schema.
    """
    _check(q, key_cache, value_cache, block_table, cu_seqlens_q, seq_lens_k, k_scale, v_scale, query_positions)
    if scale <= 0 or soft_cap < 0:
        raise ValueError(f"scale must be above 0 and soft_cap at least 0, got {scale} and {soft_cap}")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window needs causal=True and at least 1 key, got window={window}, causal={causal}")
    return PAGED_ATTENTION(
        q, key_cache, value_cache, block_table, cu_seqlens_q, seq_lens_k, max_seqlen_q, max_seqlen_k, scale, causal,
        window, soft_cap, k_scale, v_scale, query_positions, padded,
    )  # fmt: skip


def _check(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    query_positions: Tensor | None,
) -> None:
    if q.dim() != 3 or key_cache.dim() != 4 or value_cache.dim() != 4 or key_cache.shape[3] != q.shape[2]:
        shapes = [list(x.shape) for x in (q, key_cache, value_cache)]
        raise ValueError("q [T, HQ, D], key_cache [blocks, B, HKV, D], value_cache [blocks, B, HKV, DV] "
                         f"are needed, got {shapes}")  # fmt: skip
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dtype != value_cache.dtype:
        raise ValueError(f"the caches differ: {list(key_cache.shape)} {key_cache.dtype}, "
                         f"{list(value_cache.shape)} {value_cache.dtype}")  # fmt: skip
    kv_heads, seqs = key_cache.shape[2], seq_lens_k.numel()
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not divide among {kv_heads} key heads")
    if block_table.shape[:1] != (seqs,) or block_table.dim() != 2 or cu_seqlens_q.shape != (seqs + 1,):
        raise ValueError(f"{seqs} sequences need block_table [{seqs}, blocks] and cu_seqlens_q [{seqs + 1}], "
                         f"got {list(block_table.shape)} and {list(cu_seqlens_q.shape)}")  # fmt: skip
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.numel() not in (1, kv_heads):
            raise ValueError(f"{name} must hold 1 value or {kv_heads}, got {list(scale.shape)}")
    if query_positions is not None and query_positions.shape != q.shape[:1]:
        raise ValueError(f"query_positions must be [{q.shape[0]}], got {list(query_positions.shape)}")


__all__ = ["OPERATIONS", "PAGED_ATTENTION", "TOLERANCE", "paged_attention"]
