"""Residual addition and normalisation by AITER; never run on AMD hardware.

`rmsnorm2d_fwd_with_add` writes the sum and its norm into two tensors that the caller gives. Everything is two-
dimensional, dense, and of one dtype, the weight included. `1 + weight` is a keyword of its newer generation: by
position it would stand where the older one has another flag.

Called as in AITER's `aiter/ops/rmsnorm.py` and vLLM's `vllm/_aiter_ops.py`; function and commit are in `call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.aiter_binding import Function
from atom_patches.kernels.registry import Verdict, no

_POSITIONAL = ("out", "input", "residual_in", "residual_out", "weight", "epsilon")
PLAIN = Function(
    "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",
    _POSITIONAL,
    call_site="vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: _rocm_aiter_rmsnorm2d_fwd_with_add_impl",
)
GEMMA = Function(
    "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",
    _POSITIONAL,
    ("gemma_norm",),
    call_site="ROCm/aiter 0bc300f740e8 aiter/ops/rmsnorm.py: rmsnorm2d_fwd_with_add",
)


def supports_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    if x.dtype not in (torch.bfloat16, torch.float16):
        return no(f"not every AITER normalises {x.dtype}; float16 and bfloat16 only")
    if not x.dtype == residual.dtype == weight.dtype:
        return no(f"AITER takes one dtype for all, not {x.dtype}, {residual.dtype} and {weight.dtype}")
    return (GEMMA if gemma else PLAIN).verdict()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    if x.numel() == 0:
        return out, total
    shape = (-1, x.shape[-1])
    args = (
        out.view(shape),
        x.reshape(shape).contiguous(),
        residual.reshape(shape).contiguous(),
        total.view(shape),
        weight.contiguous(),
        eps,
    )
    if gemma:
        GEMMA(*args, gemma_norm=True)
    else:
        PLAIN(*args)
    return out, total
