"""Rotary positions in plain torch, for engines without a kernel of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from atom_patches.models.parts import RotaryShape


class Rotary(nn.Module):
    """Turn pairs of values of each head by angles that grow with the position; computed in float32."""

    inv_freq: Tensor
    axis: Tensor

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        self.shape = shape
        frequencies, self.length = scaled_frequencies(shape)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("axis", torch.tensor(frequency_axes(shape)), persistent=False)

    def forward(self, positions: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `[rows]` or `[3, rows]`; queries and keys `[rows, heads * head_size]`."""
        angle = self._angle(positions)
        cos, sin = angle.cos()[:, None] * self.length, angle.sin()[:, None] * self.length
        return self._turn(queries, cos, sin), self._turn(keys, cos, sin)

    def _angle(self, positions: Tensor) -> Tensor:
        """`[rows, rotary_size / 2]`."""
        where = positions.float()
        if positions.dim() == 2:
            return where[self.axis].T * self.inv_freq
        return where[:, None] * self.inv_freq

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.unflatten(1, (-1, self.shape.head_size))
        turning, rest = heads.split([self.shape.rotary_size, self.shape.head_size - self.shape.rotary_size], dim=2)
        if self.shape.interleaved:
            first, second = turning.float().unflatten(2, (-1, 2)).unbind(3)
        else:
            first, second = turning.float().chunk(2, dim=2)
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, dim=3).flatten(2) if self.shape.interleaved else torch.cat(pair, dim=2)
        return torch.cat([turned.to(x.dtype), rest], dim=2).flatten(1)


def scaled_frequencies(shape: RotaryShape) -> tuple[Tensor, float]:
    """Angles for one position, `[rotary_size / 2]`, and the length that turned values get."""
    exponent = torch.arange(0, shape.rotary_size, 2, dtype=torch.float32) / shape.rotary_size
    frequencies = shape.theta**-exponent
    if shape.scaling is None:
        return frequencies, 1.0
    scaling: dict[str, Any] = dict(shape.scaling)
    turns = scaling["original_max_position_embeddings"] * frequencies / math.tau  # in what training has seen
    if scaling["rope_type"] == "llama3":
        few, many = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - few) / (many - few)).clamp(0, 1)
        return _between(frequencies, scaling["factor"], kept), 1.0
    kept = 1 - _yarn_ramp(shape, scaling)
    length = yarn_length(scaling["factor"], scaling.get("mscale", 1.0))
    if scaling.get("mscale_all_dim"):
        length /= yarn_length(scaling["factor"], scaling["mscale_all_dim"])
    return _between(frequencies, scaling["factor"], kept), length


def yarn_length(factor: float, scale: float) -> float:
    """By what yarn multiplies turned values, to keep attention as sharp over longer texts."""
    return 0.1 * scale * math.log(max(factor, 1)) + 1


def _between(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Frequencies that training has seen turn often are kept, others are stretched by the factor."""
    return frequencies * kept + frequencies / factor * (1 - kept)


def _yarn_ramp(shape: RotaryShape, scaling: dict[str, Any]) -> Tensor:
    """From 0 to 1 between the frequencies that turn `beta_fast` and `beta_slow` times in what training has seen."""
    seen, size = scaling["original_max_position_embeddings"], shape.rotary_size

    def place(turns: float) -> float:
        return size * math.log(seen / (turns * math.tau)) / (2 * math.log(shape.theta))

    first = max(math.floor(place(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(place(scaling.get("beta_slow", 1))), size - 1)
    steps = torch.arange(size // 2, dtype=torch.float32) - first
    return (steps / max(last - first, 1e-3)).clamp(0, 1)


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
