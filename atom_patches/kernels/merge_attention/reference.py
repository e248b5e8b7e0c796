"""Merging partial attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    return merge_attention_parts(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]))


def merge_attention_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    lses = lses.float().masked_fill(lses == torch.inf, -torch.inf)
    total = torch.logsumexp(lses, dim=0)
    shares = torch.exp(lses - total).masked_fill(lses.isneginf(), 0.0)
    parts = outs.float().masked_fill(lses.isneginf()[..., None], 0.0)
    out = (shares[..., None] * parts).sum(0).to(outs.dtype)
    return out.contiguous(), total.mT.contiguous().mT
