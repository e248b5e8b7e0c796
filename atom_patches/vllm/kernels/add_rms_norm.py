"""vLLM's residual addition with root-mean-square norm, which overwrites both of its inputs."""

from __future__ import annotations

import torch
import vllm.kernels  # noqa: F401  (registers the implementations of vllm.ir's operators)
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import ir

from atom_patches.kernels.registry import YES, Verdict, no


def supports_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    if x.numel() == 0:
        return no("vLLM launches no kernel for zero rows")
    if gemma:
        return YES
    if weight.dtype != x.dtype or not weight.is_contiguous():
        return no("vLLM's kernel takes a contiguous weight of x's dtype")
    return YES


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    if not gemma:
        x = x.clone(memory_format=torch.contiguous_format)
        residual = residual.clone(memory_format=torch.contiguous_format)
    y, total = timed_add_rms_norm(x, residual, weight, eps, gemma)
    return y.contiguous(), total.contiguous()


def timed_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    """What vLLM itself runs, and what is timed: without the copies that keep the caller's tensors as they are."""
    if gemma:
        total = (x.float() + residual.float()).to(x.dtype) if x.dtype == torch.float16 else x + residual
        return ir.ops.rms_norm(total, weight.float() + 1.0, eps).to(x.dtype), total
    ops.fused_add_rms_norm(x, residual, weight, eps)
    return x, residual
