"""Benchmark shapes of `gdn_decode`: the GatedDeltaNet layers of Qwen3.6-35B-A3B."""

from __future__ import annotations

from typing import Any

import torch

from atom_patches.kernels.benchmark import Case
from atom_patches.kernels.registry import dtype_name

from .decode import GDN_DECODE

HK, HV, K, V, TAPS = 16, 32, 128, 128, 4
CHANNELS = 2 * HK * K + HV * V


def _case(rows: int, state_dtype: torch.dtype) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator)

        slots = (torch.randperm(rows, generator=torch.Generator().manual_seed(0)) + 1).int().to(device)
        decay_log = draw(HV).sigmoid().mul(16).log()
        return (
            draw(rows, CHANNELS).bfloat16(), draw(rows, HV).bfloat16(), draw(rows, HV).bfloat16(),
            (draw(CHANNELS, TAPS) * TAPS**-0.5).bfloat16(), None, draw(rows + 1, TAPS - 1, CHANNELS).bfloat16().mT,
            draw(rows + 1, HV, V, K).to(state_dtype), slots, decay_log, torch.ones(HV, device=device), K**-0.5, 1e-6,
            "silu", 0,
        )  # fmt: skip

    states = 2 * (HV * V * K * state_dtype.itemsize + CHANNELS * (TAPS - 1) * 2)
    moved = rows * (states + 2 * (CHANNELS + 2 * HV + HV * V)) + 2 * CHANNELS * TAPS
    flops = rows * (HV * V * K * 7 + CHANNELS * 2 * TAPS)
    return Case(GDN_DECODE, f"{rows} rows, state {dtype_name(state_dtype)}", inputs, bytes=moved, flops=flops)


CASES = tuple(_case(rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 4, 16, 64, 256))
