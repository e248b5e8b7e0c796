"""Rows by plan as vLLM moves rows: `index_select` and `index_copy_`, tensor by tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(xs: list[Tensor], more: list[Tensor], index: Tensor, padded: bool) -> list[Tensor]:
    if more:
        xs = [torch.cat(pair) for pair in zip(xs, more, strict=True)]
    return [_select(x, index, padded) for x in xs]


def pack_rows(xs: list[Tensor], index: Tensor, padded: bool) -> Tensor:
    rows = [_select(x, index, padded) for x in xs]
    return torch.cat([out.flatten(1) if out.dim() > 1 else out[:, None] for out in rows], dim=1)


def scatter_rows(xs: list[Tensor], index: Tensor, num_rows: int, padded: bool) -> list[Tensor]:
    outs: list[Tensor] = []
    for x in xs:
        # Padding goes to one more row at the end.
        out = x.new_zeros(num_rows + int(padded), *x.shape[1:])
        _bits(out).index_copy_(0, (index.where(index >= 0, num_rows) if padded else index).long(), _bits(x))
        outs.append(out[:num_rows])
    return outs


def _select(x: Tensor, index: Tensor, padded: bool) -> Tensor:
    if not padded:
        return _bits(x).index_select(0, index).view(x.dtype)
    if not x.shape[0]:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    is_padding = (index < 0).view(-1, *[1] * (x.dim() - 1))
    return _bits(x).index_select(0, index.clamp_min(0)).masked_fill_(is_padding, 0).view(x.dtype)


def _bits(x: Tensor) -> Tensor:
    """x itself, or its bytes: torch does not select from 8-bit floats."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
