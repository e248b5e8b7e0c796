"""SGLang's root-mean-square norms, as `RMSNorm` and `GemmaRMSNorm` call them on a GPU.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sgl_kernel import gemma_rmsnorm, rmsnorm
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no


def supports_rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    if x.numel() == 0:
        return no("SGLang launches no kernel for zero rows")
    if weight.dtype != x.dtype or not weight.is_contiguous():
        return no("SGLang's kernel takes a contiguous weight of x's dtype")
    if x.element_size() != 2:
        return no(f"SGLang's kernel computes in half precision only, not {x.dtype}")
    if x.shape[-1] % 8:
        return no("SGLang's kernel reads 16 bytes at a time")
    return YES


def rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    rows = x if x.dim() == 2 else x.contiguous().reshape(-1, x.shape[-1])
    y = (gemma_rmsnorm if gemma else rmsnorm)(rows, weight, eps)
    return y.reshape(x.shape).contiguous()
