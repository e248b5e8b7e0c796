"""Contracts of AITER's normalisations."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOAT16, FLOATS, Arguments, contract

OPUS = "ROCm/aiter 0bc300f740e8 aiter/ops/rmsnorm.py"  # rms_norm_opus, rmsnorm2d_fwd_with_add_opus, _check
CK = "amd-aiter 0.1.7.post2.dev18 csrc/py_itfs_ck/rmsnorm_ck_kernels.cu"  # rmsnorm2d, rmsnorm2d_with_add


def _normalised(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    wide = x.float()
    factor = weight.float() + 1.0 if gemma else weight.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype)


@contract(
    "aiter.ops.rmsnorm:rms_norm",
    "input weight epsilon",
    OPUS,
    CK,
    "vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: _rocm_aiter_rms_norm_impl",
)
def rms_norm(a: Arguments) -> Tensor:
    """Both generations at once: two dimensions (the older takes stride(0) for the distance of two rows, and the call
    site flattens), float16 or bfloat16 (the older has no float32), a weight of the input's dtype."""
    x = a.tensor("input", shape=(None, None), dtype=FLOAT16, layout="rows")
    a.require(x.shape[0] > 0, "no rows: an empty grid is launched")
    weight = a.tensor("weight", shape=(x.shape[1],), dtype=x.dtype, layout="contiguous")
    return _normalised(x, weight, a.number("epsilon"), False)


@contract(
    "aiter.ops.rmsnorm:rms_norm_opus",
    "out input weight epsilon model_sensitive gemma_norm",
    OPUS,
)
def rms_norm_opus(a: Arguments) -> None:
    x = a.tensor("input", shape=(None, None), dtype=FLOATS, layout="rows")
    a.require(x.shape[0] > 0, "no rows: an empty grid is launched")
    weight = a.tensor("weight", shape=(x.shape[1],), dtype=x.dtype, layout="contiguous")
    out = a.tensor("out", shape=tuple(x.shape), dtype=x.dtype, layout="contiguous")
    a.require(a.integer("model_sensitive") == 0, "model_sensitive rounds in between, as no reference of ours does")
    out.copy_(_normalised(x, weight, a.number("epsilon"), a.flag("gemma_norm")))


@contract(
    "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",
    "out input residual_in residual_out weight epsilon gemma_norm",
    OPUS,
    CK,
    "vllm-project/vllm v0.20.2 vllm/_aiter_ops.py: _rocm_aiter_rmsnorm2d_fwd_with_add_impl",
    "ROCm/aiter f1a213f780c1 op_tests/test_rmsnorm2d.py: run_ck",
)
def rmsnorm2d_fwd_with_add(a: Arguments) -> None:
    """residual_out = input + residual_in; out = its norm. The older generation has no float32 and no gemma_norm."""
    x = a.tensor("input", shape=(None, None), dtype=FLOAT16, layout="rows")
    a.require(x.shape[0] > 0, "no rows: an empty grid is launched")
    same = {"shape": tuple(x.shape), "dtype": x.dtype, "layout": "contiguous"}
    residual, residual_out, out = (a.tensor(n, **same) for n in ("residual_in", "residual_out", "out"))
    weight = a.tensor("weight", shape=(x.shape[1],), dtype=x.dtype, layout="contiguous")
    a.require(len({t.data_ptr() for t in (x, residual, residual_out, out)}) == 4, "the four must not overlap")
    total = x.float() + residual.float()
    residual_out.copy_(total)
    wide = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + a.number("epsilon"))
    out.copy_(wide * (weight.float() + (1.0 if a.flag("gemma_norm") else 0.0)))
