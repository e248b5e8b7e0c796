"""Norms with the weights as these models' checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atom_patches.kernels.add_rms_norm import add_rms_norm
from atom_patches.kernels.gated_rms_norm import gated_rms_norm
from atom_patches.kernels.rms_norm import rms_norm


class RmsNorm(nn.Module):
    """Root-mean-square norm with the weight as a factor or, in Gemma's form, 1 + weight.

    `norm(x)` is the norm of x; `norm(x, residual)` is that of the sum, and the sum.
    """

    def __init__(self, size: int, eps: float, *, gemma: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if gemma else torch.ones(size))
        self.variance_epsilon = eps
        self.gemma = gemma

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.alone(x)
        return self.of_sum(x, residual)

    def alone(self, x: Tensor) -> Tensor:
        """Of x `[..., size]`."""
        return rms_norm(x, self.weight, self.variance_epsilon, gemma=self.gemma)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Of x + residual, and the sum; neither is written to."""
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon, gemma=self.gemma)


class GatedRmsNorm(nn.Module):
    """The norm of each head's output in a GatedDeltaNet layer, times an activated gate."""

    def __init__(self, size: int, eps: float, activation: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Both `[rows, heads, size]`."""
        return gated_rms_norm(x, gate, self.weight, self.variance_epsilon, activation=self.activation)
