"""SGLang's gated norm as GatedDeltaNet calls it: norm before gate.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sglang.kernels.ops.attention.fla.layernorm_gated import rms_norm_gated
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no


def supports_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Verdict:
    return YES if x.numel() else no("SGLang launches no kernel for zero rows")


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    size = x.shape[-1]
    y = rms_norm_gated(
        x=x.reshape(-1, size),
        weight=weight,
        bias=None,
        z=gate.reshape(-1, size),
        eps=eps,
        is_rms_norm=True,
        activation="swish" if activation == "silu" else activation,
    )
    return y.view(x.shape)
