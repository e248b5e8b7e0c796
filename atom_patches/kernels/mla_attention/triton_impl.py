"""Absorbed latent attention in Triton: split over the keys when the queries alone do not fill the GPU."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from atom_patches.kernels.launch import converts_e4m3, has_large_shared_memory, processors
from atom_patches.kernels.registry import YES, Verdict, no

from . import _kernels, hopper
from .layout import GROUP, Layout, layout_of, parts_of
from .splits import in_splits

MOST_SPLITS = 64
#: Rows of `indices` are read at once.
MOST_INDICES = 16384
#: Values a program can hold per query row; float32 takes twice the room.
LARGEST_LATENT = {torch.bfloat16: 512, torch.float16: 512, torch.float32: 128}
_CODE = {Layout.PLAIN: 0, Layout.SCALED: 1, Layout.PACKED: 2}


class _Config(NamedTuple):
    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def _config(blocks_of: Any, heads_together: int, most_keys: int, layout: Layout, q: Tensor) -> _Config:
    """Tiles, and as many splits as it takes to give every processor a program, or two that are small.

    Packed keys are unpacked on their way to the matrix unit that takes 64 rows at once: that is faster with rows that
    are padding than the other way with 16 rows.

    Args:
        blocks_of: how many blocks of queries there are, by rows per block.
        heads_together: rows that share their keys: more of them than a block are never needed.
        most_keys: keys of one query, at most.
    """
    small = not has_large_shared_memory() or q.dtype == torch.float32
    rows = max(16, triton.next_power_of_2(heads_together))
    if small:
        rows, keys, warps, stages = min(32, rows), 16, 4, 1
    elif rows > 32 or layout is Layout.PACKED:
        rows, keys, warps, stages = 64, 64, 8, 2
    else:
        keys, warps, stages = 32, 4, 2
    programs = processors(q.device) * (1 if rows == 64 else 2)
    splits = int(min(MOST_SPLITS, max(1, programs // max(1, blocks_of(rows))), triton.cdiv(max(1, most_keys), keys)))
    return _Config(rows, keys, 1 << (splits.bit_length() - 1), warps, stages)


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
    return _supported(q, cache, value_size)


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
    tokens, heads = q.shape[:2]
    sequences = seq_lens_k.shape[0]
    layout = layout_of(cache, value_size, q.shape[2] - value_size)

    def blocks_of(rows: int) -> int:
        return max(triton.cdiv(tokens * heads, rows), min(sequences, tokens))

    config = _config(blocks_of, heads * max_seqlen_q, max_seqlen_k, layout, q)
    blocks = triton.cdiv(tokens * heads, config.rows) + sequences + 1
    pointers, sizes, strides = _cache_arguments(cache, cache_scale, value_size, q.shape[2] - value_size, by_slot=False)
    cu_seqlens_q, seq_lens_k = cu_seqlens_q.contiguous(), seq_lens_k.contiguous()

    def launch(out: Tensor, lse: Tensor) -> None:
        _kernels.dense[(blocks, config.splits)](
            q, *pointers, block_table, cu_seqlens_q, seq_lens_k, out, lse,
            tokens, sequences, heads, scale, q.stride(0), q.stride(1), *block_table.stride(), *strides,
            ALIGNED=heads % config.rows == 0, **sizes, **_meta(config),
        )  # fmt: skip

    return in_splits(launch, q, value_size, config.splits)


def supports_sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> Verdict:
    if indices.shape[1] > MOST_INDICES:
        return no(f"{indices.shape[1]} slots a query; at most {MOST_INDICES}")
    return _supported(q, cache, value_size)


def sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, cache_scale: Tensor | None, value_size: int
) -> tuple[Tensor, Tensor]:
    if hopper.serves(q, cache, indices, value_size).ok:
        return hopper.sparse_mla_attention(q, cache, indices, scale, value_size)
    tokens, heads = q.shape[:2]
    top_k = indices.shape[1]
    layout = layout_of(cache, value_size, q.shape[2] - value_size)
    config = _config(lambda rows: tokens * triton.cdiv(heads, rows), heads, top_k, layout, q)
    pointers, sizes, strides = _cache_arguments(cache, cache_scale, value_size, q.shape[2] - value_size, by_slot=True)

    def launch(out: Tensor, lse: Tensor) -> None:
        _kernels.sparse[(tokens * triton.cdiv(heads, config.rows), config.splits)](
            q, *pointers, indices, out, lse,
            tokens, top_k, heads, scale, q.stride(0), q.stride(1), *indices.stride(), *strides,
            TOP_K2=triton.next_power_of_2(max(1, top_k)), **sizes, **_meta(config),
        )  # fmt: skip

    return in_splits(launch, q, value_size, config.splits)


def supports_mla_cache_write(
    latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None
) -> Verdict:
    if latent.stride(1) != 1 or rope.stride(1) != 1 or cache.stride(2) != 1:
        return no("the values of a row are not next to each other")
    if latent.shape[1] > 8192 or rope.shape[1] > 8192:
        return no("rows of more than 8192 values")
    return YES


def mla_cache_write(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor, cache_scale: Tensor | None) -> None:
    if not slots.shape[0]:
        return
    pointers, sizes, strides = _cache_arguments(cache, cache_scale, latent.shape[1], rope.shape[1], by_slot=True)
    _kernels.write[(slots.shape[0],)](
        latent, rope, slots, *pointers, latent.stride(0), rope.stride(0), slots.stride(0), *strides,
        latent.shape[1], rope.shape[1], LAYOUT=sizes["LAYOUT"], PAGE=sizes["PAGE"],
        GROUPS=triton.next_power_of_2(triton.cdiv(latent.shape[1], GROUP)),
        R=triton.next_power_of_2(rope.shape[1]), num_warps=4,
    )  # fmt: skip


def _supported(q: Tensor, cache: Tensor, value_size: int) -> Verdict:
    largest = LARGEST_LATENT.get(q.dtype)
    if largest is None:
        return no(f"queries of {q.dtype}")
    rope_size = q.shape[2] - value_size
    for size, most in ((value_size, largest), (rope_size, 128)):
        if size != triton.next_power_of_2(size) or not 16 <= size <= most:
            return no(f"a latent of {value_size} and a rope part of {rope_size} in {q.dtype}: powers of two up to "
                      f"{largest} and 128 only")  # fmt: skip
    layout = layout_of(cache, value_size, rope_size)
    if layout is Layout.PLAIN and cache.dtype != q.dtype:
        return no(f"queries of {q.dtype} over a cache of {cache.dtype}")
    if layout is not Layout.PLAIN and not converts_e4m3():
        return no("Triton reads E4M3 from compute capability 8.9 on")
    if layout is Layout.PACKED and q.dtype == torch.float16:
        return no("float16 does not reach down to a weight times the scale of a packed group")
    if q.stride(2) != 1 or cache.stride(2) != 1:
        return no("the values of a row are not next to each other")
    return YES


def _cache_arguments(
    cache: Tensor, cache_scale: Tensor | None, latent_size: int, rope_size: int, *, by_slot: bool
) -> tuple[tuple[Tensor | None, ...], dict[str, int], tuple[int, ...]]:
    """Pointers (E4M3 as bytes), compile-time sizes and strides of the cache, as every kernel takes them.

    Blocks that lie one behind the other are one row of slots: a kernel that is given slots then needs no division.
    """
    if by_slot and cache.stride(0) == cache.shape[1] * cache.stride(1):
        cache = cache.as_strided((cache.shape[0] * cache.shape[1], 1, cache.shape[2]), (cache.stride(1), 0, 1))
    layout, latent, scales, rope = parts_of(cache, latent_size, rope_size)
    page = cache.shape[1]
    if layout is not Layout.PLAIN:
        latent = latent.view(torch.uint8)
        rope = rope.view(torch.uint8) if layout is Layout.SCALED else rope
    of_scales = (scales.stride(0), scales.stride(1)) if scales is not None else (0, 0)
    strides = (latent.stride(0), latent.stride(1), *of_scales, rope.stride(0), rope.stride(1))
    sizes = {"L": latent_size, "R": rope_size, "LAYOUT": _CODE[layout], "PAGE": page}
    return (latent, scales, rope, cache_scale), sizes, strides


def _meta(config: _Config) -> dict[str, int]:
    return {
        "ROWS": config.rows,
        "KEYS": config.keys,
        "STAGES": config.stages,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
