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
        _bits(out)[index >= 0] = _bits(x)[index[index >= 0].long()]
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
        _bits(out)[index[index >= 0].long()] = _bits(x)[index >= 0]
        found.append(out)
    return found


def _bits(x: Tensor) -> Tensor:
    """x itself, or its bytes: torch does not index every 8-bit float."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
