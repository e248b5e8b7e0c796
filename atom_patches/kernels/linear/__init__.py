"""A product of few rows with a matrix of weights: what a decode step reads most memory for.

    y = x @ weight.T

Schema: x [M, K], float16 or bfloat16, columns dense; weight [N, K] of the same dtype, columns dense; arrived [ceil(N /
SMALLEST_TILE)] or longer, int32, all zeros; y [M, N] in x's dtype, contiguous. Sums are float32 and rounded once.

`arrived` is for implementations that share a tile of outputs among programs, which count there who has come. It is all
zeros again when the call is over, so that it counts as not written to, and a captured graph can be replayed. Calls that
may overlap, on other streams, need one each: a layer has its own.

Source: the linear layer of the transformer. Deterministic in every provider: what is added, and in which order, follows
from shapes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference, per dtype: the result's rounding, and that of the sums.
TOLERANCE = {"bfloat16": (8e-3, 1e-3), "float16": (1e-3, 1e-3)}

SMALLEST_TILE = 16
"""Outputs that have a counter of their own at least."""

MOST_ROWS = 16
"""Rows for which Triton has kernels: of more, cuBLAS was measured to be the faster one for most matrices."""


def _fake(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _shape_class(x: Tensor, weight: Tensor, arrived: Tensor) -> str:
    rows = bucket(x.shape[0], (1, MOST_ROWS))
    return f"{dtype_name(x.dtype)} n{weight.shape[0]} k{weight.shape[1]} rows{rows}"


LINEAR = Operation(
    package=__name__,
    name="linear",
    schema="(Tensor x, Tensor weight, Tensor arrived) -> Tensor",
    reference=reference.linear,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
)
OPERATIONS = (LINEAR,)


def counters(outputs: int, device: torch.device | None = None) -> Tensor:
    """A new `arrived` for `outputs` outputs."""
    return torch.zeros(-(-outputs // SMALLEST_TILE), dtype=torch.int32, device=device)


def linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """Return x [M, K] times weight [N, K], [M, N].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [M, K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype:
        raise ValueError(f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    if arrived.dtype != torch.int32 or arrived.numel() * SMALLEST_TILE < weight.shape[0]:
        raise ValueError(f"arrived must be what counters({weight.shape[0]}) returns, got {list(arrived.shape)}")
    return LINEAR(x, weight, arrived)


__all__ = ["LINEAR", "MOST_ROWS", "OPERATIONS", "SMALLEST_TILE", "TOLERANCE", "counters", "linear"]
