"""SGLang's gating of GatedDeltaNet, whose write strength is rounded to b's dtype on its way.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no


def supports_gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Verdict:
    if a.numel() == 0:
        return no("SGLang launches no kernel for zero rows")
    if b.dtype != torch.float32:
        return no(f"SGLang rounds the write strength to {b.dtype}, the dtype of b")
    if a.stride(1) != 1 or b.stride(1) != 1 or not (A_log.is_contiguous() and dt_bias.is_contiguous()):
        return no("SGLang's kernel reads contiguous rows only")
    return YES


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    return g[0], beta[0]
