"""What a rank of two moves in a full-attention layer of Qwen3.6-35B-A3B (2 heads of 256), and in a recurrent one.

`pack` before the all-gather of keys and values, `restore` after it, `scatter` of the recurrent layer's inputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import GATHER_ROWS, PACK_ROWS, SCATTER_ROWS

KEY_VALUE = ((2, 256), (2, 256))
RECURRENT = ((16, 128), (16, 128), (32, 128), (32,), (32,))
"""Row shapes: k and v of full attention; q, k, v, a, b of a recurrent layer."""


def _columns(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _random(device: torch.device, *shape: int) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)


def _views(packed: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    parts = packed.split([torch.Size(shape).numel() for shape in shapes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _order(rows: int) -> Tensor:
    """Rows of two ranks, in turns of a request each, as a restored step has them."""
    return torch.arange(rows).view(-1, 2, rows // 4 // 2).transpose(0, 1).reshape(-1)


def _pack(rows: int, device: torch.device) -> tuple[Any, ...]:
    xs = [_random(device, rows, *shape) for shape in KEY_VALUE]
    return xs, torch.arange(rows, device=device), False


def _restore(rows: int, device: torch.device) -> tuple[Any, ...]:
    received = _random(device, rows, _columns(KEY_VALUE))
    return _views(received, KEY_VALUE), [], _order(rows).to(device), False


def _scatter(rows: int, device: torch.device) -> tuple[Any, ...]:
    xs = [_random(device, rows, *shape) for shape in RECURRENT]
    return xs, _order(rows).to(device), rows, False


def _cases(rows: int) -> tuple[Case, ...]:
    moved = 4 * rows * _columns(KEY_VALUE) + 8 * rows
    return (
        Case(PACK_ROWS, f"pack k, v of {rows} rows", partial(_pack, rows), bytes=moved, flops=0),
        Case(GATHER_ROWS, f"restore k, v of {rows} rows", partial(_restore, rows), bytes=moved, flops=0),
        Case(
            SCATTER_ROWS, f"scatter q, k, v, a, b of {rows} rows", partial(_scatter, rows),
            bytes=4 * rows * _columns(RECURRENT) + 8 * rows, flops=0,
        ),
    )  # fmt: skip


CASES = _cases(4096) + _cases(16384)
