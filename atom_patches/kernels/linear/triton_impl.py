"""The product in Triton: one row by sums in registers, more by the matrix units."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.linear import MOST_ROWS
from atom_patches.kernels.linear._few_rows import few_rows
from atom_patches.kernels.linear._one_row import one_row
from atom_patches.kernels.registry import YES, Verdict, no


def supports_linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Verdict:
    if x.dtype not in (torch.bfloat16, torch.float16):
        return no(f"the matrix units would round {x.dtype}; float16 and bfloat16 only")
    if x.shape[0] > MOST_ROWS:
        return no(f"{x.shape[0]} rows are better served by larger tiles; at most {MOST_ROWS}")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        return no("columns must be dense")
    return YES


def linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[0])
    if y.numel() == 0:
        return y
    if x.shape[0] == 1:
        one_row(x, weight, y)
    else:
        few_rows(x, weight, arrived, y)
    return y
