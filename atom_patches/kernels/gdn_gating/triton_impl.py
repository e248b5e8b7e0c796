"""Decay and write strength of GatedDeltaNet in Triton."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.rows import power_of_two, programs

ELEMENTS = 1024
"""A program computes about so many pairs."""


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads = a.shape
    g = torch.empty((tokens, heads), dtype=torch.float32, device=a.device)
    beta = torch.empty_like(g)
    if g.numel() == 0:
        return g, beta
    columns = power_of_two(heads)
    rows = min(max(1, ELEMENTS // columns), power_of_two(tokens))
    _gdn_gating[(programs(tokens, rows),)](
        a, b, A_log, dt_bias, g, beta, tokens, *a.stride(), *b.stride(), A_log.stride(0), dt_bias.stride(0),
        HEADS=heads, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return g, beta


@triton.jit
def _gdn_gating(
    a, b, A_log, dt_bias, g, beta, tokens, a_row, a_column, b_row, b_column, log_stride, bias_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, COLUMNS)[None, :]
    inside = (row < tokens) & (head < HEADS)
    wide = row.to(tl.int64)
    rate = tl.exp(tl.load(A_log + head * log_stride, mask=head < HEADS, other=0.0).to(tl.float32))
    x = tl.load(a + wide * a_row + head.to(tl.int64) * a_column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head * bias_stride, mask=head < HEADS, other=0.0).to(tl.float32)
    strength = tl.load(b + wide * b_row + head.to(tl.int64) * b_column, mask=inside, other=0.0).to(tl.float32)
    place = wide * HEADS + head
    tl.store(g + place, -rate * _softplus(x), mask=inside)
    tl.store(beta + place, tl.sigmoid(strength), mask=inside)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) without overflow, and exact where exp(x) is small: log(u) * e / (u - 1) of u = 1 + e is log1p(e)
    whatever the sum's rounding."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    rounded = u == 1.0
    log1p = tl.where(rounded, e, tl.log(u) * (e / tl.where(rounded, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p
