"""Residual addition and root-mean-square normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    total = (x.float() + residual.float()).to(x.dtype).contiguous()
    wide = total.float()
    factor = weight.float() + 1.0 if gemma else weight.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype), total
