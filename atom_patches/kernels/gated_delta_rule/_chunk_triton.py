"""The chunked operators of the gated delta rule in Triton: one kernel over all chunks, then the scan."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from atom_patches.kernels.launch import backend
from atom_patches.kernels.registry import YES, Verdict, dtype_name, no

from ._chunk_kernels import prepare_kernel, scan_kernel

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_segment",
    "supports_chunk_gated_delta_rule",
    "supports_chunk_gated_delta_rule_segment",
]

CHUNK = 64
SHORT = 4 * CHUNK
"""Rows of a sequence up to which it counts as short."""

FEW = 64
"""Programs of the scan that leave so many of a GPU's processors idle that smaller ones are worth their loads."""

LARGEST_HEAD = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> Verdict:
    if q.dtype != k.dtype:
        return no(f"the tensor cores multiply one dtype, not {dtype_name(q.dtype)} and {dtype_name(k.dtype)}")
    return supports_chunk_gated_delta_rule_segment(k, v, g, beta, cu_seqlens)


def supports_chunk_gated_delta_rule_segment(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Verdict:
    if k.dtype not in DTYPES:
        return no(f"{dtype_name(k.dtype)} keys; float16, bfloat16 and float32 only")
    return supports_head(k.shape[2])


def supports_head(key_size: int) -> Verdict:
    """Whether the scan serves keys of this size; values may have any, they are taken in blocks."""
    if key_size > LARGEST_HEAD:
        return no(f"a state of {key_size} keys does not fit into registers; at most {LARGEST_HEAD}")
    return YES


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    num_seqs = cu_seqlens.shape[0] - 1
    final = torch.empty(num_seqs, v.shape[1], v.shape[2], k.shape[2], dtype=torch.float32, device=v.device)
    if num_seqs == 0:
        return out.zero_(), final
    if v.shape[0] == 0:
        return out, final.zero_() if initial_state is None else final.copy_(initial_state)
    cu_seqlens = cu_seqlens.contiguous()
    chunks = prepare(q, k, g, beta, cu_seqlens, out=out)
    scan(q, k, v, chunks, cu_seqlens, out=out, initial=initial_state, final=final, scale=scale)
    return out, final


def chunk_gated_delta_rule_segment(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    num_seqs, heads, size = cu_seqlens.shape[0] - 1, v.shape[1], k.shape[2]
    final = torch.empty(num_seqs, heads, v.shape[2], size, dtype=torch.float32, device=v.device)
    maps = torch.empty(num_seqs, heads, size, size, dtype=torch.float32, device=v.device)
    if num_seqs == 0:
        return final, maps
    if v.shape[0] == 0:
        return final.zero_(), maps.copy_(torch.eye(size, device=v.device))
    cu_seqlens = cu_seqlens.contiguous()
    chunks = prepare(None, k, g, beta, cu_seqlens, out=None)
    scan(None, k, v, chunks, cu_seqlens, final=final, maps=maps)
    return final, maps


class Chunks(NamedTuple):
    """What is known of every chunk before its initial state is; see `_chunk_kernels`.

    Attributes:
        writes: [HV, T, K] in the keys' dtype.
        scores: [HV, T, CHUNK] in the keys' dtype, not written for a call without outputs.
        since: [HV, T] float32, the decays since the chunk's start.
    """

    writes: Tensor
    scores: Tensor
    since: Tensor


def bound_chunks(total: int, num_seqs: int) -> int:
    """How many chunk numbers `total` rows in `num_seqs` sequences can have."""
    return total // CHUNK + num_seqs


def padded(size: int) -> int:
    """A block that holds a head of `size` values and that the tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


class Precision(NamedTuple):
    """How products of float32 are taken: those of the inputs, and those within the triangular inverse."""

    inputs: str
    merge: str


def precision(dtype: torch.dtype, device: torch.device) -> Precision:
    """float32 inputs get (nearly) float32 products; for half inputs, TF32 within the inverse is finer than what it
    is rounded to."""
    if not on_cuda(device):
        return Precision("ieee", "ieee")
    return Precision("tf32x3", "tf32x3") if dtype == torch.float32 else Precision("tf32", "tf32")


def on_cuda(device: torch.device) -> bool:
    """Whether kernels are compiled for NVIDIA: false for the interpreter and for ROCm."""
    return device.type != "cpu" and backend() == "cuda"


class PrepareConfig(NamedTuple):
    """Meta-parameters of `prepare_kernel`: warps, the registers that a thread may use at most (NVIDIA only), and
    whether the scores wait in memory for the inverse."""

    warps: int
    registers: int | None
    stash: bool


def prepare_config(dtype: torch.dtype, device: torch.device) -> PrepareConfig:
    if dtype == torch.float32 or not on_cuda(device):
        return PrepareConfig(8, None, False)
    return PrepareConfig(4, 168, True)


def prepare(
    q: Tensor | None,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor | None,
    gates: tuple[Tensor, Tensor] | None = None,
    config: PrepareConfig | None = None,
) -> Chunks:
    """Launch `prepare_kernel`.

    Args:
        cu_seqlens, gates: contiguous.
        out: [T, HV, V], of which the rows that no sequence owns become 0; None: no outputs will be wanted.
        gates: (A_log, dt_bias) where g and beta are the gates' projections a and b.
    """
    total, key_heads, key_size = k.shape
    num_seqs, heads = cu_seqlens.shape[0] - 1, g.shape[1]
    writes = torch.empty(heads, total, key_size, dtype=k.dtype, device=k.device)
    scores = writes if out is None else torch.empty(heads, total, CHUNK, dtype=k.dtype, device=k.device)
    chunks = Chunks(writes, scores, torch.empty(heads, total, dtype=torch.float32, device=k.device))
    take, config = precision(k.dtype, k.device), config or prepare_config(k.dtype, k.device)
    q, to = k if q is None else q, k if out is None else out
    decay_log, decay_bias = (g, g) if gates is None else gates
    prepare_kernel[(bound_chunks(total, num_seqs), heads)](
        q, k, g, beta, decay_log, decay_bias, cu_seqlens, to, *chunks, num_seqs, total,
        *q.stride(), *k.stride(), *g.stride(), *beta.stride(), *to.stride(),
        K=key_size, V=to.shape[2], GROUP=heads // key_heads, BT=CHUNK, BK=padded(key_size),
        PART=min(64, padded(key_size)), BV=min(64, padded(to.shape[2])), SINGLE=num_seqs == 1, GATED=gates is not None,
        HALF=k.dtype != torch.float32, WITH_OUTPUT=out is not None, STASH=config.stash,
        PRECISION=take.inputs, MERGE_PRECISION=take.merge, num_warps=config.warps,  # type: ignore[call-arg]
        **({} if config.registers is None else {"maxnreg": config.registers}),
    )  # fmt: skip
    return chunks


class ScanConfig(NamedTuple):
    """Meta-parameters of the scan: value columns of a program, warps, chunks in flight, and how many programs lie
    between those that read the same rows at the same time."""

    block: int
    warps: int
    stages: int
    gap: int = 1


def scan_config(
    dtype: torch.dtype, heads: int, value_size: int, total: int, num_seqs: int, device: torch.device
) -> ScanConfig:
    if dtype == torch.float32 or not on_cuda(device):
        return ScanConfig(min(16, padded(value_size)), 4, 1)
    # A pipeline is not worth its memory, which would be room for another program, where it would hardly be filled.
    stages = 1 if total <= SHORT * num_seqs else 3
    block = 16 if num_seqs * heads * value_size <= FEW * 32 else 32
    return ScanConfig(min(block, padded(value_size)), 4, stages)


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    chunks: Chunks,
    cu_seqlens: Tensor,
    *,
    final: Tensor,
    out: Tensor | None = None,
    initial: Tensor | None = None,
    maps: Tensor | None = None,
    slots: Tensor | None = None,
    resumed: Tensor | None = None,
    null_slot: int | None = None,
    scale: float = 1.0,
    config: ScanConfig | None = None,
) -> None:
    """Launch `scan_kernel`.

    Args:
        cu_seqlens, slots, resumed: contiguous.
        out: the outputs; None: none are computed, and q and the scores are not read.
        initial: [N, HV, V, K] or, with `slots` and without `maps`, a pool [S, HV, V, K]; None: zeros.
        final: likewise; where it is a pool it is the same one.
        maps: [N, HV, K, K], the sequences' maps of their initial states, if they are wanted; then no `out`.
        slots: [N] integers; negative ones and `null_slot` are padding.
        resumed: [N] bool, which sequences read `initial`; None: all.
    """
    num_seqs, heads = cu_seqlens.shape[0] - 1, v.shape[1]
    key_size, value_size = k.shape[2], v.shape[2]
    config = config or scan_config(k.dtype, heads, value_size, v.shape[0], num_seqs, k.device)
    blocks = triton.cdiv(value_size, config.block) + (triton.cdiv(key_size, config.block) if maps is not None else 0)
    query, to, start = k if q is None else q, v if out is None else out, final if initial is None else initial
    ends = final if maps is None else maps
    scans = triton.cdiv(num_seqs * heads, config.gap) * config.gap
    scan_kernel[(blocks * scans,)](
        query, k, v, *chunks, to, start, final, ends,
        cu_seqlens if slots is None else slots, cu_seqlens if resumed is None else resumed, cu_seqlens,
        scale, -1 if null_slot is None else null_slot, v.shape[0], heads, num_seqs * heads,
        *query.stride(), *k.stride(), *v.stride(), *to.stride(), *start.stride(), *final.stride(), *ends.stride(),
        K=key_size, V=value_size, GROUP=heads // k.shape[1], BT=CHUNK, BK=padded(key_size), BV=config.block,
        BLOCKS=blocks, GAP=config.gap,
        WITH_INITIAL=initial is not None, WITH_RESUMED=resumed is not None, WITH_OUTPUT=out is not None,
        WITH_SLOTS=slots is not None, POOLED=slots is not None and maps is None, WITH_NULL=null_slot is not None,
        PRECISION=precision(k.dtype, k.device).inputs, STAGES=config.stages, num_warps=config.warps,  # type: ignore[call-arg]
    )  # fmt: skip
