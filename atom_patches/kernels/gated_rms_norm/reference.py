"""Gated root-mean-square normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """See the package's schema."""
    wide, opening = x.float().contiguous(), gate.float().sigmoid()
    if activation == "silu":
        opening = gate.float() * opening
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float() * opening).to(x.dtype)
