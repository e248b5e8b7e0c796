"""Paged attention in Triton.

One kernel does all: a program takes the query heads of one key head for a few consecutive rows of one sequence, and
walks over the pages that those rows see. Decode and short chunks give few programs, so their keys are divided among
`splits` programs each, whose partial results are merged by the merge kernel. How the work is cut follows from shapes
and the two upper bounds alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom_patches.kernels.launch import backend, converts_e4m3, processors
from atom_patches.kernels.merge_attention.triton_impl import merge_into
from atom_patches.kernels.registry import YES, Verdict, no
from atom_patches.kernels.rows import power_of_two

from ._triton_kernel import attention_kernel

LARGEST_HEAD = 256
MOST_SPLITS = 128
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


class Config(NamedTuple):
    """How a call is cut.

    Attributes:
        block_m: query rows times query heads of one key head in a program.
        block_n: keys of one step of its walk.
        splits: programs that share the keys of the same rows.
        shortest: fewest keys that are worth a program, a multiple of block_n.
        by_sequence: every sequence fits into one program's rows.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int
    shortest: int
    by_sequence: bool


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
    if q.dtype not in FLOATS or (key_cache.dtype != q.dtype and key_cache.dtype not in EIGHT_BITS):
        return no(f"queries of {q.dtype} with a cache of {key_cache.dtype}")
    if key_cache.dtype == torch.float8_e4m3fn and not converts_e4m3():
        return no("Triton reads E4M3 from compute capability 8.9 on")
    if key_cache.dtype == torch.float8_e4m3fnuz and backend() == "cuda":
        return no("NVIDIA GPUs do not know float8_e4m3fnuz")
    if max(q.shape[2], value_cache.shape[3]) > LARGEST_HEAD:
        return no(f"heads of {q.shape[2]} and {value_cache.shape[3]} values; at most {LARGEST_HEAD}")
    group, most = q.shape[1] // key_cache.shape[2], 64 if q.dtype == torch.float32 else 128
    if group > most:
        return no(f"{group} query heads a key head; at most {most} of {q.dtype}")
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
    kv_heads, value_size = value_cache.shape[2:]
    seqs = seq_lens_k.numel()
    out = q.new_empty(rows, heads, value_size)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device).mT
    if out.numel() == 0 or seqs == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    group = heads // kv_heads
    config = _config(q, key_cache, value_cache, seqs, max_seqlen_q, max_seqlen_k, window)
    block_q = config.block_m // group
    if config.by_sequence:
        tiles = seqs + (-(-rows // block_q) if padded else 0)
    else:
        tiles = rows // block_q + seqs + int(padded)
    to, to_lse = out, lse
    if config.splits > 1:
        to = torch.empty(config.splits, rows, heads, value_size, dtype=torch.float32, device=q.device)
        to_lse = torch.empty(config.splits, rows, heads, dtype=torch.float32, device=q.device)
    launch: Any = attention_kernel
    launch[(tiles * kv_heads, config.splits)](
        to, to_lse, q, key_cache, value_cache, block_table, cu_seqlens_q, seq_lens_k, query_positions, k_scale, v_scale,
        rows, seqs, tiles, scale, window or 0, soft_cap, config.shortest,
        to.stride(0) if config.splits > 1 else 0, *to.stride()[-3:-1],
        to_lse.stride(0) if config.splits > 1 else 0, *to_lse.stride()[-2:],
        *q.stride(), *key_cache.stride(), *value_cache.stride(), *block_table.stride(), cu_seqlens_q.stride(0),
        seq_lens_k.stride(0), query_positions.stride(0) if query_positions is not None else 0,
        _head_stride(k_scale), _head_stride(v_scale),
        KV_HEADS=kv_heads, GROUP=group, BLOCK_Q=block_q, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        HEAD=size, VALUE=value_size, BLOCK_D=max(16, power_of_two(size)),
        BLOCK_V=max(16, power_of_two(value_size)), PAGE=key_cache.shape[1],
        CAUSAL=causal, WINDOWED=window is not None, SOFT_CAP=soft_cap > 0, POSITIONS=query_positions is not None,
        K_SCALED=k_scale is not None, V_SCALED=v_scale is not None, SPLIT=config.splits > 1,
        BY_SEQUENCE=config.by_sequence,
        PRECISION="ieee" if backend() == "hip" else "tf32x3", num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if config.splits > 1:
        merge_into(out, lse, to, to_lse)
    return out, lse


def _head_stride(scale: Tensor | None) -> int:
    """Step from one head's scale to the next; 0 where one serves all."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def _config(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    seqs: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window: int | None,
) -> Config:
    rows, heads, size = q.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    wide = max(size, value_cache.shape[3]) > 128
    by_sequence = max_seqlen_q * group <= 64
    if by_sequence:
        block_m = max(16, power_of_two(max_seqlen_q * group))
        block_n, warps, stages = (32 if wide else 64), 4, 3
        shortest, programs_wanted = 128, 4 * processors(q.device)
    else:
        block_m, block_n, warps, stages = 128, (64 if wide else 128), 8, 2
        shortest, programs_wanted = 512, processors(q.device)
    if q.dtype == torch.float32:
        block_m, block_n, warps, stages = min(block_m, 64), 32, 8, 1
    if backend() == "hip":  # 64 KiB of shared memory
        block_m, block_n, stages = min(block_m, 64 if wide else 128), min(block_n, 32 if wide else 64), 1
    block_m = max(block_m, power_of_two(group))
    tiles = seqs if by_sequence else rows // (block_m // group) + seqs
    keys = max_seqlen_k if window is None else min(max_seqlen_k, window + max_seqlen_q)
    splits = _splits(tiles * kv_heads, programs_wanted, keys, shortest)
    return Config(block_m, block_n, warps, stages, splits, shortest, by_sequence)


def _splits(programs: int, wanted: int, keys: int, shortest: int) -> int:
    """Programs that share the keys of one: enough for `wanted` in all, as long as each has `shortest` keys."""
    return max(1, min(wanted // programs, -(-keys // shortest), MOST_SPLITS))
