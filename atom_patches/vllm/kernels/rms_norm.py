"""vLLM's root-mean-square norm: its CUDA operator, and for Gemma's weights what `GemmaRMSNorm` runs outside a compiled
graph."""

from __future__ import annotations

import torch
import vllm.kernels  # noqa: F401  (registers the implementations of vllm.ir's operators)
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import ir

from atom_patches.kernels.registry import YES, Verdict, no


def supports_rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    if x.numel() == 0:
        return no("vLLM launches no kernel for zero rows")
    if gemma:
        return YES
    if weight.dtype != x.dtype or not weight.is_contiguous():
        return no("vLLM's kernel takes a contiguous weight of x's dtype")
    if x.dim() not in (2, 3, 4) or x.stride(-1) != 1:
        return no("vLLM's kernel takes two to four dimensions, the last of them contiguous")
    return YES


def rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    if gemma:
        return ir.ops.rms_norm(x, weight.float() + 1.0, eps).to(x.dtype).contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ops.rms_norm(y, x, weight, eps)
    return y
