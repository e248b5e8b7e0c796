"""From an attention layer's fused projection to what its attention kernel takes, in one pass.

    split  ->  norm of every q and k head  ->  rotary embedding  ->  write of k and v into the paged cache

Schema, T tokens, HQ query and HK key heads of D values, R rotary values:

- qkv [T, N], columns contiguous, rows at any stride. A row holds the query heads, then the keys, then the values. With
  `gated` every query head is a pair of D values each, [query, gate], so that N is (2 HQ + 2 HK) D; else (HQ + 2 HK) D.
- q_weight, k_weight [D] or None (no norm of those heads): x / sqrt(mean(x^2) + eps) * w, with `gemma` * (1 + w).
- cos_sin_cache [P, R], R even and at most D: the cosines of R/2 angles, then their sines; None (then positions is None
  too): no rotation. The first R values of a head rotate, the rest pass. Pair i is (i, R/2 + i) with `neox`, else
  (2i, 2i + 1); of a pair (x, y) becomes (x cos - y sin, y cos + x sin).
- positions [T] or [3, T], int32 or int64, any strides, in [0, P). Three rows are M-RoPE (time, height, width), and
  mrope_section (t, h, w), which sums up to R/2, says which row an angle takes: the first t angles time, the next h
  height, the last w width; with `mrope_interleaved` angle i takes height if i % 3 == 1 and i < 3h, width if i % 3 == 2
  and i < 3w, else time. One row is the same for all of them.
- key_cache, value_cache [blocks, block size, HK, D], columns contiguous, other strides any (the NHD and HND layouts of
  the engines), in qkv's dtype or an FP8 E4M3 type; both or neither.
- slots [S], S <= T, int32 or int64: token i goes to row slots[i] % block size of block slots[i] // block size. A
  negative slot, and a token at or behind S, is written nowhere; its outputs are computed all the same, because another
  rank may keep its keys. No slot occurs twice.
- k_scale, v_scale float32, one element, or None (1): an FP8 cache holds k / k_scale, limited to what its type can hold.
  Other caches take none.

Outputs in qkv's dtype, contiguous: q [T, HQ, D], k [T, HK, D], and the gate [T, HQ, D] as it came ([0, HQ, D] without
`gated`). Computed in float32 and rounded once; the cache is given the rounded k.

Source: the layout and M-RoPE are those of transformers' Qwen3-Next and Qwen3-VL; J. Su et al., "RoFormer", 2021
(arXiv:2104.09864).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference, per dtype of qkv, and of an FP8 cache: a provider may
#: round after each of the fused steps, as the engines' separate kernels do.
TOLERANCE = {
    "float32": (1e-5, 1e-5),
    "bfloat16": (1.6e-2, 4e-2),
    "float16": (2e-3, 5e-3),
    "float8_e4m3fn": (0.13, 4e-2),
    "float8_e4m3fnuz": (0.13, 4e-2),
}

#: Dtypes of a cache that holds scaled values.
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def _fake(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    gemma: bool,
    gated: bool,
    neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = qkv.shape[0]
    return (
        qkv.new_empty((tokens, num_q_heads, head_dim)),
        qkv.new_empty((tokens, num_kv_heads, head_dim)),
        qkv.new_empty((tokens if gated else 0, num_q_heads, head_dim)),
    )


def _shape_class(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    gemma: bool,
    gated: bool,
    neox: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool,
) -> str:
    rotary = 0 if cos_sin_cache is None else cos_sin_cache.shape[1]
    cache = "no cache" if key_cache is None else f"{dtype_name(key_cache.dtype)} cache"
    parts = [dtype_name(qkv.dtype), f"q{num_q_heads} kv{num_kv_heads} d{head_dim} r{rotary}", cache]
    parts += [name for name, asked in (("gated", gated), ("gemma", gemma), ("mrope", mrope_section)) if asked]
    return " ".join([*parts, f"tokens{bucket(qkv.shape[0], (1, 16, 64, 256, 4096))}"])


QK_NORM_ROPE_CACHE = Operation(
    package=__name__,
    name="qk_norm_rope_cache",
    schema=(
        "(Tensor qkv, Tensor? positions, Tensor? cos_sin_cache, Tensor? q_weight, Tensor? k_weight, "
        "Tensor(a!)? key_cache, Tensor(b!)? value_cache, Tensor? slots, Tensor? k_scale, Tensor? v_scale, "
        "int num_q_heads, int num_kv_heads, int head_dim, float eps, bool gemma, bool gated, bool neox, "
        "int[]? mrope_section, bool mrope_interleaved) -> (Tensor, Tensor, Tensor)"
    ),
    reference=reference.qk_norm_rope_cache,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    reference_reads=True,
    unmeasured=("triton", "engine", "torch"),  # bindings of engines are a kernel for each step
)
OPERATIONS = (QK_NORM_ROPE_CACHE,)


def qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    gemma: bool = False,
    gated: bool = False,
    neox: bool = True,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    slots: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split a projection's output, normalise and rotate its queries and keys, and write the keys and values.

    See the package for shapes and for what each argument switches on. The caches are written to.

    Returns:
        q [T, HQ, D], k [T, HK, D], v [T, HK, D], which is a view of qkv, and the gate [T, HQ, D], None unless `gated`.

    Raises:
        ValueError: shapes, dtypes or optional arguments do not fit together.
    """
    kv_size = num_kv_heads * head_dim
    width = num_q_heads * head_dim * (2 if gated else 1) + 2 * kv_size
    if qkv.dim() != 2 or qkv.shape[1] != width:
        raise ValueError(f"qkv must be [T, {width}] for these heads, got {list(qkv.shape)}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(f"{name} must be [{head_dim}], got {list(weight.shape)}")
    _check_rotation(qkv, positions, cos_sin_cache, head_dim, mrope_section)
    if key_cache is not None or value_cache is not None or slots is not None:
        _check_cache(qkv, key_cache, value_cache, slots, k_scale, v_scale, num_kv_heads, head_dim)
    section = None if mrope_section is None else list(mrope_section)
    q, k, gate = QK_NORM_ROPE_CACHE(
        qkv, positions, cos_sin_cache, q_weight, k_weight, key_cache, value_cache, slots, k_scale, v_scale,
        num_q_heads, num_kv_heads, head_dim, eps, gemma, gated, neox, section, mrope_interleaved,
    )  # fmt: skip
    v = qkv[:, width - kv_size :].unflatten(1, (num_kv_heads, head_dim))
    return q, k, v, gate if gated else None


def _check_rotation(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    head_dim: int,
    mrope_section: Sequence[int] | None,
) -> None:
    if positions is None or cos_sin_cache is None:
        if positions is not None or cos_sin_cache is not None:
            raise ValueError("positions and cos_sin_cache come together")
        return
    tokens, rotary = qkv.shape[0], cos_sin_cache.shape[-1]
    if cos_sin_cache.dim() != 2 or rotary % 2 or rotary > head_dim:
        raise ValueError(
            f"cos_sin_cache must be [P, R], R even and at most {head_dim}, got {list(cos_sin_cache.shape)}"
        )
    if positions.shape not in ((tokens,), (3, tokens)):
        raise ValueError(f"positions must be [{tokens}] or [3, {tokens}], got {list(positions.shape)}")
    if positions.dim() == 2 and (mrope_section is None or len(mrope_section) != 3 or 2 * sum(mrope_section) != rotary):
        raise ValueError(f"positions [3, T] need an mrope_section of three that sum up to {rotary // 2}")


def _check_cache(
    qkv: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    if key_cache is None or value_cache is None or slots is None:
        raise ValueError("key_cache, value_cache and slots come together")
    if slots.dim() != 1 or slots.shape[0] > qkv.shape[0]:
        raise ValueError(f"slots must be [S], S at most {qkv.shape[0]}, got {list(slots.shape)}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[2:] != (num_kv_heads, head_dim):
            raise ValueError(
                f"{name} must be [blocks, block size, {num_kv_heads}, {head_dim}], got {list(cache.shape)}"
            )
        if cache.shape != key_cache.shape or cache.dtype != key_cache.dtype:
            raise ValueError("key_cache and value_cache must have one shape and dtype")
    if key_cache.dtype not in (qkv.dtype, *FP8):
        raise ValueError(f"a cache must be {qkv.dtype} like qkv, or FP8 E4M3, got {key_cache.dtype}")
    if key_cache.dtype not in FP8 and (k_scale is not None or v_scale is not None):
        raise ValueError(f"scales are for FP8 caches; this one is {key_cache.dtype}")


__all__ = ["FP8", "OPERATIONS", "QK_NORM_ROPE_CACHE", "TOLERANCE", "qk_norm_rope_cache"]
