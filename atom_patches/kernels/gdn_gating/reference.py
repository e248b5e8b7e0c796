"""Decay and write strength of GatedDeltaNet in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g, beta), both float32 [T, HV]: the logarithm of the decay, at most 0, and the write strength
    in (0, 1).

    Args:
        a, b: [T, HV] projections of the hidden states.
        A_log, dt_bias: [HV] weights. They are widened to float32 first: exp(A_log) may not fit into half
            precision.
    """
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid()
