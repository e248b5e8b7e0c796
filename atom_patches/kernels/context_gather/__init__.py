"""Rows by plan: what prefill context parallelism does before and after its collectives, several tensors at a time.

    gather_rows   out[r] = x[index[r]]
    pack_rows     the same, all tensors' rows side by side in one buffer: one all-gather instead of one a tensor
    scatter_rows  out[index[r]] = x[r], and 0 in the rows that no index names

Each rank packs the rows that it owns, the ranks exchange them, and each restores the order of the step with
`gather_rows` from views of what it received: `received[:, :w].view(-1, heads, size)`. Rows that a rank has anyway need
not travel: they are `more`, and row n + i of `gather_rows` means row i of `more`, where n are the rows of `xs`.

Schema, R indices, tensors x_j with n rows each and any further dimensions of their own:

    xs       [n, ...] each      at least one tensor; any dtypes, but one dtype for `pack_rows`
    more     [m, ...] each      none, or one a tensor, alike but for the number of rows
    index    [R]                integers below n + m; negative: a padding row, which gives 0
    num_rows                    rows of the outputs of `scatter_rows`; the indices there are distinct and below it
    padded                      whether `index` may be negative; without it, it must not be

    gather_rows  -> [R, ...] each, contiguous
    pack_rows    -> [R, W], W elements in a row of all x together, in their order
    scatter_rows -> [num_rows, ...] each, contiguous

Any strides are admitted. Bits are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Copies are exact.
TOLERANCE = {"any": (0.0, 0.0)}

_ROWS = (64, 512, 4096, 16384)


def _fake_gather(xs: list[Tensor], more: list[Tensor], index: Tensor, padded: bool) -> list[Tensor]:
    return [x.new_empty(index.shape[0], *x.shape[1:]) for x in xs]


def _fake_pack(xs: list[Tensor], index: Tensor, padded: bool) -> Tensor:
    return xs[0].new_empty(index.shape[0], sum(row_size(x) for x in xs))


def _fake_scatter(xs: list[Tensor], index: Tensor, num_rows: int, padded: bool) -> list[Tensor]:
    return [x.new_empty(num_rows, *x.shape[1:]) for x in xs]


def row_size(x: Tensor) -> int:
    """Elements of one row of x [n, ...]."""
    return torch.Size(x.shape[1:]).numel()


def _class_of(xs: list[Tensor], rows: int) -> str:
    width = sum(row_size(x) * x.element_size() for x in xs)
    return f"{len(xs)} tensors bytes{bucket(width, (1024, 8192))} rows{bucket(rows, _ROWS)}"


def _class_gather(xs: list[Tensor], more: list[Tensor], index: Tensor, padded: bool) -> str:
    return _class_of(xs, index.shape[0])


def _class_pack(xs: list[Tensor], index: Tensor, padded: bool) -> str:
    return _class_of(xs, index.shape[0])


def _class_scatter(xs: list[Tensor], index: Tensor, num_rows: int, padded: bool) -> str:
    return _class_of(xs, num_rows)


GATHER_ROWS = Operation(
    package=__name__,
    name="gather_rows",
    schema="(Tensor[] xs, Tensor[] more, Tensor index, bool padded) -> Tensor[]",
    reference=reference.gather_rows,
    fake=_fake_gather,
    shape_class=_class_gather,
    tolerance=TOLERANCE,
    reference_reads=True,
)
PACK_ROWS = Operation(
    package=__name__,
    name="pack_rows",
    schema="(Tensor[] xs, Tensor index, bool padded) -> Tensor",
    reference=reference.pack_rows,
    fake=_fake_pack,
    shape_class=_class_pack,
    tolerance=TOLERANCE,
    reference_reads=True,
)
SCATTER_ROWS = Operation(
    package=__name__,
    name="scatter_rows",
    schema="(Tensor[] xs, Tensor index, int num_rows, bool padded) -> Tensor[]",
    reference=reference.scatter_rows,
    fake=_fake_scatter,
    shape_class=_class_scatter,
    tolerance=TOLERANCE,
    reference_reads=True,
)
OPERATIONS = (GATHER_ROWS, PACK_ROWS, SCATTER_ROWS)


def gather_rows(
    xs: Sequence[Tensor], index: Tensor, *, more: Sequence[Tensor] = (), padded: bool = True
) -> list[Tensor]:
    """Rows `index` of each of `xs`, or of `more` behind them; 0 where the index is negative.

    Args:
        xs, more, index, padded: as in the package's schema.

    Raises:
        ValueError: shapes or dtypes that contradict the schema.
    """
    _check(xs, index)
    if more and [(x.shape[1:], x.dtype) for x in xs] != [(x.shape[1:], x.dtype) for x in more]:
        raise ValueError(f"more must be like xs but for the rows, got {_shapes(more)} for {_shapes(xs)}")
    if len({x.shape[0] for x in more}) > 1:
        raise ValueError(f"the tensors of more have different numbers of rows: {_shapes(more)}")
    return GATHER_ROWS(list(xs), list(more), index, padded)


def pack_rows(xs: Sequence[Tensor], index: Tensor, *, padded: bool = True) -> Tensor:
    """Rows `index` of all of `xs`, side by side: [R, W]; 0 where the index is negative.

    Args:
        xs, index, padded: as in the package's schema.

    Raises:
        ValueError: shapes or dtypes that contradict the schema.
    """
    _check(xs, index)
    if len({x.dtype for x in xs}) > 1:
        raise ValueError(f"one buffer holds one dtype, got {', '.join(dtype_name(x.dtype) for x in xs)}")
    return PACK_ROWS(list(xs), index, padded)


def scatter_rows(xs: Sequence[Tensor], index: Tensor, num_rows: int, *, padded: bool = True) -> list[Tensor]:
    """Tensors of `num_rows` rows in which row index[r] is row r of each of `xs`, and rows without an index are 0.

    Args:
        xs, index, num_rows, padded: as in the package's schema.

    Raises:
        ValueError: shapes that contradict the schema.
    """
    _check(xs, index)
    if index.shape[0] != xs[0].shape[0]:
        raise ValueError(f"{xs[0].shape[0]} rows need as many indices, got {index.shape[0]}")
    return SCATTER_ROWS(list(xs), index, num_rows, padded)


def _check(xs: Sequence[Tensor], index: Tensor) -> None:
    if not xs or any(x.dim() == 0 for x in xs) or len({x.shape[0] for x in xs}) > 1:
        raise ValueError(f"at least one tensor is needed, all with the same number of rows, got {_shapes(xs)}")
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index must be [R] of int32 or int64, got {list(index.shape)} of {dtype_name(index.dtype)}")


def _shapes(xs: Sequence[Tensor]) -> str:
    return ", ".join(str(list(x.shape)) for x in xs)


__all__ = [
    "GATHER_ROWS", "OPERATIONS", "PACK_ROWS", "SCATTER_ROWS", "TOLERANCE", "gather_rows", "pack_rows", "scatter_rows",
]  # fmt: skip
