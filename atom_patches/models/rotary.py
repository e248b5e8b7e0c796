"""Rotary positions in plain torch, for engines without a kernel of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atom_patches.models.parts import RotaryShape


class Rotary(nn.Module):
    """Turn pairs of values of each head by angles that grow with the position; computed in float32.

    Raises:
        ValueError: the checkpoint asks for a scaling of longer positions.
    """

    inv_freq: Tensor
    axis: Tensor

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        if shape.scaling is not None:
            raise ValueError(f"rope_type must be 'default' here, got {shape.scaling.get('rope_type')!r}")
        self.shape = shape
        exponent = torch.arange(0, shape.rotary_size, 2, dtype=torch.float32) / shape.rotary_size
        self.register_buffer("inv_freq", shape.theta**-exponent, persistent=False)
        self.register_buffer("axis", torch.tensor(frequency_axes(shape)), persistent=False)

    def forward(self, positions: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `[rows]` or `[3, rows]`; queries and keys `[rows, heads * head_size]`."""
        angle = self._angle(positions)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return self._turn(queries, cos, sin), self._turn(keys, cos, sin)

    def _angle(self, positions: Tensor) -> Tensor:
        """`[rows, rotary_size / 2]`."""
        where = positions.float()
        if positions.dim() == 2:
            return where[self.axis].T * self.inv_freq
        return where[:, None] * self.inv_freq

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.unflatten(1, (-1, self.shape.head_size))
        half = self.shape.rotary_size // 2
        first, second, rest = heads.split([half, half, self.shape.head_size - 2 * half], dim=2)
        first, second = first.float(), second.float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).to(x.dtype)
        return torch.cat([turned, rest], dim=2).flatten(1)


def frequency_axes(shape: RotaryShape) -> list[int]:
    """Per frequency, which of time (0), height (1) and width (2) turns it.

    The three take turns as long as height and width have frequencies left; time has all others.
    """
    if shape.sections is None:
        return [0] * (shape.rotary_size // 2)
    return [
        index % 3 if index % 3 and index < 3 * shape.sections[index % 3] else 0
        for index in range(shape.rotary_size // 2)
    ]
