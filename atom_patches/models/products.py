"""Products with weights as they are stored, and those whose rounding matters more than usual."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor, Tensor], Tensor]
"""From x [rows, inputs] and weights [outputs, inputs] to `x @ weight.T` [rows, outputs]."""


def linear_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in float32, as exactly as the device gives it in one product of what both are stored in."""
    if x.dtype != weight.dtype or not x.is_cuda:
        return linear(x.float(), weight.float())
    if torch.version.hip is not None:
        return linear(x, weight).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
