"""Attention to selected latents on Hopper, whose warp groups share out the work: when it is served, and its launch.

What Triton leaves to the compiler, who gathers, who multiplies and who waits for whom, Gluon lets a kernel say.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from atom_patches.kernels.launch import processors, trades_registers
from atom_patches.kernels.registry import YES, Verdict, no

from .layout import Layout, layout_of
from .splits import in_splits

TRIED = "3.6."
"""How releases of Triton begin whose Gluon these kernels were written for; it is not stable yet."""

LATENT, ROPE = 512, 64
MOST_SLOTS = 4096
"""A query's slots that are read at once, for the last one in use."""

ALIGNED = 16
"""Bytes that are copied at once, and so the alignment of every row."""

NARROW = 16
WIDE = 64
"""Heads of a program. Up to 16 are narrow; 17 to 63 are filled up to one wide program, whose products have 64 rows."""

REGISTERS = 168
"""Of each thread when a program starts. Then those that gather hand some to those that attend."""

ATTEND, GATHER = {False: 224, True: 208}, {False: 56, True: 88}
"""Registers of a thread in wide programs, by whether keys are packed: unpacking takes some."""

GATHER_NARROW = 104


def serves(q: Tensor, cache: Tensor, indices: Tensor, value_size: int) -> Verdict:
    """Whether these kernels take such arguments of ``sparse_mla_attention`` on the current GPU."""
    if not trades_registers():
        return no("not a GPU of compute capability 9.0")
    if not triton.__version__.startswith(TRIED):
        return no(f"Triton {triton.__version__}; its Gluon was tried in {TRIED}* only")
    if q.dtype != torch.bfloat16 or (value_size, q.shape[2] - value_size) != (LATENT, ROPE):
        return no("bfloat16 queries over a latent of 512 and a rope part of 64 only")
    if layout_of(cache, LATENT, ROPE) is Layout.SCALED:
        return no("the rows of the cache have one scale")
    if indices.shape[1] > MOST_SLOTS:
        return no(f"{indices.shape[1]} slots a query; at most {MOST_SLOTS}")
    if cache.stride(2) != 1 or cache.stride(0) != cache.shape[1] * cache.stride(1):
        return no("the rows of the cache are not one behind the other")
    if q.stride(2) != 1 or not (_aligned(q, q.stride(0), q.stride(1)) and _aligned(cache, cache.stride(1))):
        return no(f"a row does not begin at a multiple of {ALIGNED} bytes")
    return YES


def _aligned(tensor: Tensor, *strides: int) -> bool:
    size = tensor.element_size()
    return tensor.data_ptr() % ALIGNED == 0 and all(stride * size % ALIGNED == 0 for stride in strides)


def sparse_mla_attention(
    q: Tensor, cache: Tensor, indices: Tensor, scale: float, value_size: int
) -> tuple[Tensor, Tensor]:
    """As the operation of this name; where ``serves`` says yes."""
    from ._hopper_narrow import narrow
    from ._hopper_wide import wide

    tokens, heads = q.shape[:2]
    top_k = indices.shape[1]
    packed = layout_of(cache, LATENT, ROPE) is Layout.PACKED
    rows = cache.view(torch.uint8).view(torch.int32) if packed else cache
    together = NARROW if heads <= NARROW else WIDE
    blocks = _parts(heads, together)
    splits = _splits(processors(q.device), tokens * blocks, _parts(top_k, 64 if together == NARROW else 128))

    def launch(out: Tensor, lse: Tensor) -> None:
        kernel, registers = (narrow, {"GATHER_REGS": GATHER_NARROW}) if together == NARROW else (
            wide, {"ATTEND_REGS": ATTEND[packed], "GATHER_REGS": GATHER[packed]}
        )  # fmt: skip
        kernel[(tokens * blocks, splits)](
            q, rows, indices, out, lse, tokens, top_k, heads, scale, q.stride(0), q.stride(1), *indices.stride(),
            rows.stride(1), TOP_K2=max(128, triton.next_power_of_2(top_k)), PACKED=packed, **registers,
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip

    return in_splits(launch, q, value_size, splits)


def _parts(count: int, size: int) -> int:
    return -(-count // size)


def _splits(processors: int, programs: int, tiles: int) -> int:
    """As many, a power of two, as give every processor a program: it takes most of one's shared memory."""
    most = max(1, min(processors // max(1, programs), tiles))
    return 1 << (most.bit_length() - 1)


__all__ = ["serves", "sparse_mla_attention"]
