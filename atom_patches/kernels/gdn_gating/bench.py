"""GatedDeltaNet's gating at the shape of Qwen3.6-35B-A3B."""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import GDN_GATING

HEADS = 32


def _case(tokens: int, dtype: torch.dtype) -> Case:
    def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        a, b = (torch.randn(tokens, HEADS, device=device).to(dtype) for _ in range(2))
        return a, b, torch.randn(HEADS, device=device), torch.randn(HEADS, device=device)

    elements = tokens * HEADS
    name = "fp32" if dtype == torch.float32 else "bf16"
    return Case(
        GDN_GATING,
        f"{tokens} tokens, {HEADS} heads, {name}",
        inputs,
        bytes=elements * (2 * dtype.itemsize + 8) + 8 * HEADS,
        flops=12 * elements,
        note="" if dtype == torch.float32 else "vLLM would round the write strength to bf16",
    )


CASES = tuple(_case(tokens, torch.float32) for tokens in (1, 16, 64, 4096, 16384)) + (_case(16384, torch.bfloat16),)
