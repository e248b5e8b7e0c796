"""SGLang's residual addition with root-mean-square norm, which overwrites both of its inputs.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from sgl_kernel import fused_add_rmsnorm, gemma_fused_add_rmsnorm
from torch import Tensor

from atom_patches.kernels.registry import Verdict

from .rms_norm import supports_rms_norm


def supports_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    return supports_rms_norm(x, weight, eps, gemma)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    y = x.clone(memory_format=torch.contiguous_format)
    total = residual.clone(memory_format=torch.contiguous_format)
    size = x.shape[-1]
    timed_add_rms_norm(y.view(-1, size), total.view(-1, size), weight, eps, gemma)
    return y, total


def timed_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    """What SGLang itself runs, and what is timed: without the copies that keep the caller's tensors as they are."""
    (gemma_fused_add_rmsnorm if gemma else fused_add_rmsnorm)(x, residual, weight, eps)
    return x, residual
