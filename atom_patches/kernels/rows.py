"""Kernels over the rows of a tensor: where each row lies, and how many rows and warps a program takes."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit


class Rows(NamedTuple):
    """Tensors of one shape [..., D], seen as `count` rows; row r is the pair (r // inner, r % inner).

    Attributes:
        tensors: the tensors themselves, or copies of those whose rows need more than two strides.
        strides: per tensor the strides of the pair and of the columns.
    """

    tensors: tuple[Tensor, ...]
    count: int
    inner: int
    strides: tuple[tuple[int, int, int], ...]


def rows_of(*tensors: Tensor) -> Rows:
    """See `Rows`; `inner` is 1 wherever one stride reaches every row of every tensor."""
    shape = tensors[0].shape
    size = shape[-1]
    count = tensors[0].numel() // size if size else 0
    if all(t.is_contiguous() for t in tensors):
        return Rows(tensors, count, 1, ((size, 0, 1),) * len(tensors))
    if len(shape) == 3 and not all(t.stride(0) == t.stride(1) * shape[1] for t in tensors):
        return Rows(tensors, count, shape[1], tuple(t.stride() for t in tensors))  # type: ignore[arg-type]
    flat = tensors if len(shape) == 2 else tuple(t.reshape(-1, size) for t in tensors)
    return Rows(flat, count, 1, tuple((t.stride(0), 0, t.stride(1)) for t in flat))


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`; in a launch, `triton.next_power_of_2` would take 2 us."""
    return 1 << max(0, count - 1).bit_length()


class Tile(NamedTuple):
    """What one program takes: a power of two of rows, of columns (at least a row), and of warps."""

    rows: int
    columns: int
    warps: int


#: Up to so many rows a program takes one, because more programs are worth more than fewer.
FEW = 512


def tile(count: int, size: int, itemsize: int) -> Tile:
    """The tile for `count` rows of `size` values: one load of 16 bytes a thread for few rows, two for many."""
    columns = power_of_two(size)
    loads = max(1, columns * itemsize // 16)
    if count <= FEW:
        return Tile(1, columns, min(16, max(1, loads // 32)))
    return Tile(max(1, 256 // loads), columns, min(16, max(4, loads // 64)))


def programs(count: int, taken: int) -> int:
    """How many programs of `taken` rows cover `count` rows."""
    return -(-count // taken)


@jit
def row_offsets(row, outer_stride, inner_stride, INNER: tl.constexpr):
    """Where rows (int32) begin, in int64."""
    if INNER == 1:
        return row.to(tl.int64) * outer_stride
    return (row // INNER).to(tl.int64) * outer_stride + (row % INNER).to(tl.int64) * inner_stride


__all__ = ["FEW", "Rows", "Tile", "power_of_two", "programs", "row_offsets", "rows_of", "tile"]
