"""Root-mean-square normalisation by AITER; never run on AMD hardware.

`rms_norm(input, weight, epsilon)` takes two dimensions, the last of them dense, and a weight of the input's dtype; its
older generation has no float32. It knows no `1 + weight`: for that, `rms_norm_opus(out, ..., gemma_norm)` is called
where this AITER has it. Neither accepts zero rows. Other strides are made dense here.

Called as in AITER's `aiter/ops/rmsnorm.py` and vLLM's `vllm/_aiter_ops.py`; function and commit are in `call_site`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.aiter_binding import Function
from atom_patches.kernels.registry import Verdict, no

PLAIN = Function(
    "aiter.ops.rmsnorm:rms_norm",
    ("input", "weight", "epsilon"),
    call_site="vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: _rocm_aiter_rms_norm_impl",
)
GEMMA = Function(
    "aiter.ops.rmsnorm:rms_norm_opus",
    ("out", "input", "weight", "epsilon", "model_sensitive", "gemma_norm"),
    call_site="ROCm/aiter 0bc300f740e8 aiter/ops/rmsnorm.py: rms_norm_opus, rmsnorm2d_fwd_opus",
)


def supports_rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    if x.dtype not in (torch.bfloat16, torch.float16):
        return no(f"not every AITER normalises {x.dtype}; float16 and bfloat16 only")
    if weight.dtype != x.dtype:
        return no(f"AITER takes a weight of the input's dtype ({x.dtype}), not {weight.dtype}")
    return (GEMMA if gemma else PLAIN).verdict()


def rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = _dense_rows(x)
    if gemma:
        GEMMA(out.view(rows.shape), rows, weight.contiguous(), eps, 0, True)
        return out
    return PLAIN(rows, weight.contiguous(), eps).reshape(x.shape).contiguous()


def _dense_rows(x: Tensor) -> Tensor:
    """x as [rows, D] with a dense last dimension; a copy where that is no view of it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
