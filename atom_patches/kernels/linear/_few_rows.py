"""Few rows, in one launch: some programs share a tile of outputs, each with its part of the inputs.

Each keeps its sum; the last of a tile's programs to come adds up what all of them kept, in their order, so that the
result does not depend on who that was.

The weights are the left operand: a warp group multiplies 64 rows at once, which the few rows of x would not fill.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom_patches.kernels import launch
from atom_patches.kernels.assembler import jit
from atom_patches.kernels.linear import MOST_ROWS, tiles


def few_rows(x: Tensor, weight: Tensor, arrived: Tensor, y: Tensor) -> None:
    """Write the product of x [rows, inputs] to y [rows, outputs]."""
    outputs, inputs = weight.shape
    cut = tiles.tile(outputs, inputs, large=launch.has_large_shared_memory())
    count = -(-outputs // cut.outputs)
    kept = torch.empty(count, cut.parts, cut.outputs, MOST_ROWS, dtype=torch.float32, device=x.device)
    _few_rows[(cut.parts, count)](
        x, weight, y, kept, arrived, x.shape[0], x.stride(0), weight.stride(0),
        OUTPUTS=outputs, INPUTS=inputs, TILE=cut.outputs, DEPTH=cut.depth, PARTS=cut.parts, ROWS=MOST_ROWS,
        num_warps=4, num_stages=cut.stages,
    )  # fmt: skip


@jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, y, kept, arrived, rows, x_row, weight_row,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0), tl.program_id(1)
    STEPS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    total = tl.zeros([TILE, ROWS], tl.float32)
    for step in range(part * STEPS // PARTS, (part + 1) * STEPS // PARTS):
        wide = _weights(weight, tile * TILE, step * DEPTH, weight_row, OUTPUTS, INPUTS, TILE, DEPTH)
        narrow = _inputs(x, step * DEPTH, rows, x_row, INPUTS, ROWS, DEPTH)
        total = tl.dot(wide, narrow.T, total)
    place = kept + tile.to(tl.int64) * (PARTS * TILE * ROWS)
    place += tl.arange(0, TILE)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(place + part * (TILE * ROWS), total)
    tl.debug_barrier()  # before anyone hears of what all threads kept
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
        tl.debug_barrier()  # all threads read what this one now knows to be there
        whole = tl.load(place, cache_modifier=".cg")
        for other in range(1, PARTS):
            whole += tl.load(place + other * (TILE * ROWS), cache_modifier=".cg")
        output, row = tile * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, ROWS)[None, :]
        inside = (output < OUTPUTS) & (row < rows)
        tl.store(y + row.to(tl.int64) * OUTPUTS + output, whole.to(y.dtype.element_ty), mask=inside)
        tl.store(arrived + tile, 0)


@jit
def _weights(
    weight, first, k, weight_row, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    """[TILE, DEPTH] of the weights, which nobody reads again in this step."""
    output, column = first + tl.arange(0, TILE)[:, None], k + tl.arange(0, DEPTH)[None, :]
    place = weight + output.to(tl.int64) * weight_row + column
    if OUTPUTS % TILE == 0 and INPUTS % DEPTH == 0:
        found = tl.load(place, eviction_policy="evict_first")
    else:
        inside = (output < OUTPUTS) & (column < INPUTS)
        found = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    return found


@jit
def _inputs(x, k, rows, x_row, INPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] of x, which every program reads."""
    row, column = tl.arange(0, ROWS)[:, None], k + tl.arange(0, DEPTH)[None, :]
    inside = row < rows
    if INPUTS % DEPTH != 0:
        inside = inside & (column < INPUTS)
    return tl.load(x + row.to(tl.int64) * x_row + column, mask=inside, other=0.0, eviction_policy="evict_last")
