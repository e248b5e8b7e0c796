"""Root-mean-square normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    """See the package's schema."""
    wide = x.float().contiguous()
    factor = weight.float() + 1.0 if gemma else weight.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype)
