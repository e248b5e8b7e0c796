"""L2 normalisation of GatedDeltaNet's keys at the shape of Qwen3.6-35B-A3B."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import L2NORM

HEADS, DIM = 16, 128


def _case(tokens: int) -> Case:
    def inputs(device: torch.device) -> tuple[Tensor, float]:
        torch.manual_seed(0)
        return torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device), 1e-6

    elements = tokens * HEADS * DIM
    label = f"{tokens} tokens, {HEADS} heads of {DIM}, bf16"
    return Case(L2NORM, label, inputs, bytes=4 * elements, flops=3 * elements)


CASES = tuple(_case(tokens) for tokens in (1, 16, 64, 4096, 16384))
