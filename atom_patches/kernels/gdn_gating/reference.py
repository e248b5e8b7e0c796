"""Decay and write strength of GatedDeltaNet in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See the package's schema."""
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g.contiguous(), b.float().sigmoid().contiguous()
