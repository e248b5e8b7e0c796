"""One row: each program multiplies and adds in registers, for outputs that are its own.

Nothing is shared: so many small programs are under way at once that memory is always being read.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.linear import tiles


def one_row(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Write the product of x [1, inputs] to y [1, outputs]."""
    (outputs, inputs), cut = weight.shape, tiles.row(weight.shape[0])
    _one_row[(triton.cdiv(outputs, cut.outputs),)](
        x, weight, y, weight.stride(0), OUTPUTS=outputs, INPUTS=inputs, TILE=cut.outputs, DEPTH=cut.depth,
        num_warps=4, num_stages=1,
    )  # fmt: skip


@jit
def _one_row(
    x, weight, y, weight_row, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE, DEPTH], tl.float32)
    for k in range(0, INPUTS, DEPTH):
        column = k + tl.arange(0, DEPTH)
        place = weight + output[:, None].to(tl.int64) * weight_row + column[None, :]
        # Nobody reads the weights again in this step; x is read by every program.
        if OUTPUTS % TILE == 0 and INPUTS % DEPTH == 0:
            wide = tl.load(place, eviction_policy="evict_first")
            narrow = tl.load(x + column, eviction_policy="evict_last")
        else:
            within = column < INPUTS
            inside = (output < OUTPUTS)[:, None] & within[None, :]
            wide = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
            narrow = tl.load(x + column, mask=within, other=0.0, eviction_policy="evict_last")
        total += wide.to(tl.float32) * narrow.to(tl.float32)[None, :]
    tl.store(y + output, tl.sum(total, 1).to(y.dtype.element_ty), mask=output < OUTPUTS)
