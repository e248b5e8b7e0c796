"""GatedDeltaNet's output norm at the shape of Qwen3.6-35B-A3B; the gate lies in the projection's output, as there."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import GATED_RMS_NORM

HEADS, DIM = 32, 128
IN_FRONT = 8192
"""Columns of q, k and v in front of the gate."""


def _case(tokens: int) -> Case:
    def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor, float, str]:
        torch.manual_seed(0)
        x = torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device)
        projected = torch.randn(tokens, IN_FRONT + HEADS * DIM, dtype=torch.bfloat16, device=device)
        gate = projected[:, IN_FRONT:].unflatten(1, (HEADS, DIM))
        return x, gate, torch.randn(DIM, dtype=torch.bfloat16, device=device), 1e-6, "silu"

    elements = tokens * HEADS * DIM
    return Case(
        GATED_RMS_NORM,
        f"{tokens} tokens, {HEADS} heads of {DIM}, bf16",
        inputs,
        bytes=6 * elements + 2 * DIM,
        flops=10 * elements,
    )


CASES = tuple(_case(tokens) for tokens in (1, 16, 64, 4096, 16384))
