"""Rows by plan in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(xs: list[Tensor], more: list[Tensor], index: Tensor, padded: bool) -> list[Tensor]:
    """See the package's schema."""
    if more:
        xs = [torch.cat(pair) for pair in zip(xs, more, strict=True)]
    found: list[Tensor] = []
    for x in xs:
        out = x.new_zeros(index.shape[0], *x.shape[1:])
        out[index >= 0] = x[index[index >= 0].long()]
        found.append(out)
    return found


def pack_rows(xs: list[Tensor], index: Tensor, padded: bool) -> Tensor:
    """See the package's schema."""
    rows = gather_rows(xs, [], index, padded)
    return torch.cat([out.flatten(1) if out.dim() > 1 else out[:, None] for out in rows], dim=1)


def scatter_rows(xs: list[Tensor], index: Tensor, num_rows: int, padded: bool) -> list[Tensor]:
    """See the package's schema."""
    found: list[Tensor] = []
    for x in xs:
        out = x.new_zeros(num_rows, *x.shape[1:])
        out[index[index >= 0].long()] = x[index >= 0]
        found.append(out)
    return found
