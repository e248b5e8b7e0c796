"""Residual addition and normalisation at the hidden size of Qwen3.6-35B-A3B."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import ADD_RMS_NORM

HIDDEN = 2048


def _case(rows: int, gemma: bool) -> Case:
    def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor, float, bool]:
        torch.manual_seed(0)
        x, residual = (torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2))
        return x, residual, torch.randn(HIDDEN, dtype=torch.bfloat16, device=device), 1e-6, gemma

    return Case(
        ADD_RMS_NORM,
        f"{rows} x {HIDDEN} bf16{' gemma' if gemma else ''}",
        inputs,
        bytes=8 * rows * HIDDEN + 2 * HIDDEN,
        flops=5 * rows * HIDDEN,
    )


CASES = tuple(_case(rows, False) for rows in (1, 16, 64, 4096, 16384)) + (_case(16, True), _case(16384, True))
