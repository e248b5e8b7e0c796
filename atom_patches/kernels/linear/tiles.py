"""How the work of one product is cut, and of which matrices that was measured on a GPU.

From benchmarks/linear-h200-2026-12-01.md: one H200, bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, int]
"""(outputs, inputs) of a matrix of weights."""

MEASURED: frozenset[Shape] = frozenset(
    {
        (6144, 4096), (4096, 4096), (4096, 12288),  # Qwen3-8B: qkv, o, down
        (9216, 2048), (12288, 2048), (64, 2048), (2048, 4096),  # Qwen3.6-35B-A3B: qkv, qkvz, ba, out
        (256, 2048),  # its router
    }
)  # fmt: skip
"""Whose product with one row was faster than cuBLAS's."""


class Row(NamedTuple):
    """How the product of one row is cut.

    Attributes:
        outputs: of a program, of four warps.
        depth: inputs of one step.
    """

    outputs: int
    depth: int


class Tile(NamedTuple):
    """How a product of more rows is cut.

    Attributes:
        outputs: of a tile; a warp group multiplies 64 rows of the left operand, which the weights are.
        depth: inputs of one step.
        parts: programs that share a tile, each with its part of the inputs.
        stages: steps that are loaded ahead.
    """

    outputs: int
    depth: int
    parts: int
    stages: int


TUNED: dict[Shape, Tile] = {
    (4096, 4096): Tile(64, 256, 2, 4),
    (4096, 12288): Tile(64, 256, 2, 4),
    (2048, 4096): Tile(64, 256, 4, 4),
}
"""The fastest where one was faster than cuBLAS; measured with 16 rows, to which fewer are filled up."""

LARGE = Tile(64, 128, 2, 5)
"""Of other matrices, for 227 KiB of shared memory a processor."""

SMALL = Tile(64, 64, 2, 2)
"""Of all, for 64 KiB."""


def row(outputs: int) -> Row:
    """For one row: the fewer outputs, the smaller the programs, so that every processor has some."""
    return Row(2, 2048) if outputs <= 4096 else Row(4, 1024)


def tile(outputs: int, inputs: int, *, large: bool) -> Tile:
    """For more rows.

    Args:
        large: whether there are 227 KiB of shared memory a processor.
    """
    return TUNED.get((outputs, inputs), LARGE) if large else SMALL
