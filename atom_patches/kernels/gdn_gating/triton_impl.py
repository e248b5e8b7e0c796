"""Decay and write strength of GatedDeltaNet in Triton."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom_patches.kernels.assembler import jit
from atom_patches.kernels.gated_delta_rule._chunk_kernels import softplus
from atom_patches.kernels.rows import power_of_two, programs

ELEMENTS = 1024
"""A program computes about so many pairs, or one token if there are not so many."""


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads = a.shape
    g = torch.empty((tokens, heads), dtype=torch.float32, device=a.device)
    beta = torch.empty_like(g)
    if g.numel() == 0:
        return g, beta
    columns = power_of_two(heads)
    most = max(1, ELEMENTS // columns)
    rows = most if tokens >= most else 1
    _gdn_gating[(programs(tokens, rows),)](
        a, b, A_log, dt_bias, g, beta, tokens, *a.stride(), *b.stride(), A_log.stride(0), dt_bias.stride(0),
        HEADS=heads, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return g, beta


@jit(do_not_specialize=["tokens"])
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
    tl.store(g + place, -rate * softplus(x), mask=inside)
    tl.store(beta + place, tl.sigmoid(strength), mask=inside)
