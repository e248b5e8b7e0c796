"""vLLM's gating of GatedDeltaNet, whose write strength has b's dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn_linear_attn import fused_gdn_gating

from atom_patches.kernels.registry import YES, Verdict, no


def supports_gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Verdict:
    if a.numel() == 0:
        return no("vLLM launches no kernel for zero rows")
    if b.dtype != torch.float32:
        return no(f"vLLM rounds the write strength to {b.dtype}, the dtype of b")
    if not all(t.is_contiguous() for t in (a, b, A_log, dt_bias)):
        return no("vLLM's kernel reads contiguous tensors only")
    return YES


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    return g[0], beta[0]
