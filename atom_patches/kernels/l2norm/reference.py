"""L2 normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x [..., D] with every row scaled to unit length, in x's dtype (eps under the root, see the
    package)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
