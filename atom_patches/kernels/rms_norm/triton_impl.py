"""Root-mean-square normalisation in Triton: one program a row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

LARGEST_ROW = 16384


def supports_rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Verdict:
    if x.shape[-1] > LARGEST_ROW:
        return no(f"a row of {x.shape[-1]} values does not fit into registers; at most {LARGEST_ROW}")
    return YES


def rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if y.numel() == 0:
        return y
    block = triton.next_power_of_2(size)
    _rms_norm[(rows.shape[0],)](
        rows, weight, y, size, rows.stride(0), rows.stride(1), weight.stride(0), eps,
        GEMMA=gemma, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return y


@triton.jit
def _rms_norm(x, weight, y, size, row_stride, column_stride, weight_stride, eps, GEMMA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(x + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column * weight_stride, mask=inside, other=0.0).to(tl.float32)
    if GEMMA:
        factor += 1.0
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    tl.store(y + row * size + column, (values * scale * factor).to(y.dtype.element_ty), mask=inside)
