"""Multi-head latent attention in its absorbed form, dense and sparse, over a paged cache of latents.

Every head of a query attends to the same row per token: a latent of L values, which is key and value at once, and R
rope values, which are key only (DeepSeek-V3: L = 512, R = 64). The projections into and out of the latent space are
the caller's. For query t and head h over its visible tokens s:

    score[s] = scale * (q[t, h] . [latent[s], rope[s]]),    lse = log sum_s exp(score[s]),
    out[t, h] = sum_s exp(score[s] - lse) * latent[s]

Schema, T query tokens, H heads, D = L + R, `value_size` = L, N sequences, B blocks of P tokens:

    q             [T, H, D]    bfloat16, float16 or float32; any strides with the last one 1
    cache         [B, P, ROW]  one of the layouts below; rows and blocks may be strided, bytes of a row are not
    cache_scale   [1] float32  of the scaled layout, else None
    out           [T, H, L]    in q's dtype
    lse           [T, H]       float32, natural logarithm

    mla_attention: sequence i owns the query rows from cu_seqlens_q[i] up to cu_seqlens_q[i + 1] ([N + 1] int32, from
    0); they are its last tokens, and each sees itself and what is before it. The sequence has seq_lens_k[i] tokens
    in the cache ([N] int32), token p in block block_table[i, p // P] ([N, any] int32). max_seqlen_q and
    max_seqlen_k are upper bounds.

    sparse_mla_attention: query t sees the tokens in the slots indices[t] ([T, K] int32; slot = block * P + place);
    negative entries, anywhere in the row, are unused.

Queries that see nothing, and rows after the last sequence, give out = 0 and lse = -inf. Entries of the cache that no
query sees are never read: they may hold NaN.

Layouts of a cache row, told apart by dtype and ROW (E4M3 bytes may come as uint8 or float8_e4m3fn):

    plain     ROW = D               bfloat16, float16, float32
    scaled    ROW = D               E4M3; value = byte * cache_scale
    packed    ROW = L + L/32 + 2R   656 bytes for 512 + 64: L E4M3 values, one float32 scale per 128 of them (the
                                    largest magnitude / 448, at least the smallest normal number), R bfloat16 values;
                                    attention reads value * scale rounded to q's dtype, as products of that dtype do

mla_cache_write puts latent [T, L] and rope [T, R] (floating, last stride 1) into the slots slots [T] (int32 or int64;
negative: the row is skipped; real ones are distinct). float32 inside, E4M3 saturates.

Source: DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv:2405.04434), section 2.1; "DeepSeek-V3.2", 2025, for the sparse form;
the packed layout is that of FlashMLA's sparse kernels, as vLLM ("fp8_ds_mla") and SGLang use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference
from .layout import layout_of

#: Largest (relative, absolute) difference from the reference, per dtype of q; lse is held to the same one.
TOLERANCE = {"float32": (1e-5, 2e-5), "bfloat16": (1e-2, 8e-3), "float16": (4e-3, 2e-3)}


def _results(q: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
    rows, heads = q.shape[:2]
    return q.new_empty(rows, heads, value_size), q.new_empty(rows, heads, dtype=torch.float32)


def _fake_mla_attention(
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
    return _results(q, value_size)


def _dense_class(
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
) -> str:
    kind = layout_of(cache, value_size, q.shape[2] - value_size).value
    sequences = bucket(seq_lens_k.shape[0], (1, 4, 16, 64, 256))
    queries = bucket(max_seqlen_q, (1, 8, 128))
    keys = bucket(max_seqlen_k, (4096, 16384, 65536))
    return f"{dtype_name(q.dtype)} {kind} h{q.shape[1]} d{q.shape[2]} seqs{sequences} q{queries} k{keys}"


MLA_ATTENTION = Operation(
    package=__name__,
    name="mla_attention",
    schema=(
        "(Tensor q, Tensor cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens_k, int max_seqlen_q, "
        "int max_seqlen_k, float scale, Tensor? cache_scale, int value_size) -> (Tensor, Tensor)"
    ),
    reference=reference.mla_attention,
    fake=_fake_mla_attention,
    shape_class=_dense_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)


def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    cache_scale: Tensor | None = None,
    value_size: int = 512,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of ragged sequences, prefill and decode alike.

    Returns:
        (out, lse); see the package's schema.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check(q, cache, cache_scale, value_size)
    sequences = seq_lens_k.shape[0]
    if cu_seqlens_q.shape != (sequences + 1,) or block_table.dim() != 2 or block_table.shape[0] != sequences:
        raise ValueError(
            f"{sequences} sequences need cu_seqlens_q [{sequences + 1}] and block_table [{sequences}, any], got "
            f"{list(cu_seqlens_q.shape)} and {list(block_table.shape)}"
        )
    return MLA_ATTENTION(
        q, cache, block_table, cu_seqlens_q, seq_lens_k, max_seqlen_q, max_seqlen_k, scale, cache_scale, value_size
    )


def _fake_sparse(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> tuple[Tensor, Tensor]:
    return _results(q, value_size)


def _sparse_class(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> str:
    kind = layout_of(cache, value_size, q.shape[2] - value_size).value
    rows = bucket(q.shape[0], (1, 4, 16, 64, 256))
    return f"{dtype_name(q.dtype)} {kind} h{q.shape[1]} d{q.shape[2]} k{indices.shape[1]} rows{rows}"


SPARSE_MLA_ATTENTION = Operation(
    package=__name__,
    name="sparse_mla_attention",
    schema=(
        "(Tensor q, Tensor cache, Tensor indices, float scale, Tensor? cache_scale, int value_size) -> (Tensor, Tensor)"
    ),
    reference=reference.sparse_mla_attention,
    fake=_fake_sparse,
    shape_class=_sparse_class,
    tolerance=TOLERANCE,
)


def sparse_mla_attention(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    *,
    scale: float,
    cache_scale: Tensor | None = None,
    value_size: int = 512,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over the cache slots that its row of `indices` names.

    Returns:
        (out, lse); see the package's schema.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check(q, cache, cache_scale, value_size)
    if indices.dim() != 2 or indices.shape[0] != q.shape[0]:
        raise ValueError(f"indices must be [{q.shape[0]}, any], got {list(indices.shape)}")
    return SPARSE_MLA_ATTENTION(q, cache, indices, scale, cache_scale, value_size)


def _fake_write(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None) -> None:
    return None


def _write_class(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None) -> str:
    kind = layout_of(cache, latent.shape[1], rope.shape[1]).value
    rows = bucket(slots.shape[0], (1, 16, 64, 256, 4096))
    return f"{dtype_name(latent.dtype)} {kind} d{latent.shape[1]}+{rope.shape[1]} rows{rows}"


MLA_CACHE_WRITE = Operation(
    package=__name__,
    name="mla_cache_write",
    schema="(Tensor latent, Tensor rope, Tensor slots, Tensor(a!) cache, Tensor? cache_scale) -> ()",
    reference=reference.mla_cache_write,
    fake=_fake_write,
    shape_class=_write_class,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (MLA_ATTENTION, SPARSE_MLA_ATTENTION, MLA_CACHE_WRITE)


def mla_cache_write(
    latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, *, cache_scale: Tensor | None = None
) -> None:
    """Put every token's latent and rope values into its slot, in the cache's layout.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    if latent.dim() != 2 or rope.dim() != 2 or not latent.shape[0] == rope.shape[0] == slots.shape[0]:
        raise ValueError(
            f"latent [T, L], rope [T, R] and slots [T] must agree, got {list(latent.shape)}, {list(rope.shape)} and "
            f"{list(slots.shape)}"
        )
    _check_cache(cache, cache_scale, latent.shape[1], rope.shape[1])
    MLA_CACHE_WRITE(latent, rope, slots, cache, cache_scale)


def _check(q: Tensor, cache: Tensor, cache_scale: Tensor | None, value_size: int) -> None:
    if q.dim() != 3 or not 0 < value_size < q.shape[2]:
        raise ValueError(f"q must be [T, H, more than value_size = {value_size}], got {list(q.shape)}")
    _check_cache(cache, cache_scale, value_size, q.shape[2] - value_size)


def _check_cache(cache: Tensor, cache_scale: Tensor | None, latent_size: int, rope_size: int) -> None:
    if cache.dim() != 3:
        raise ValueError(f"cache must be [blocks, block size, row], got {list(cache.shape)}")
    if (layout_of(cache, latent_size, rope_size).value == "scaled") != (cache_scale is not None):
        raise ValueError("cache_scale belongs to a cache of E4M3 values that share one scale, and to no other")


__all__ = [
    "MLA_ATTENTION",
    "MLA_CACHE_WRITE",
    "OPERATIONS",
    "SPARSE_MLA_ATTENTION",
    "TOLERANCE",
    "mla_attention",
    "mla_cache_write",
    "sparse_mla_attention",
]
