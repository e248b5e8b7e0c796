"""The linear layers of Qwen3-8B and of Qwen3.6-35B-A3B, the router of its experts, and a head, in decode steps.

No decoder asks for the head's product yet: its times are to say whether one should.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import LINEAR, MOST_ROWS, counters

SHAPES = {
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B o": (4096, 4096),
    "Qwen3-8B gate and up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
    "Qwen3-8B head": (151936, 4096),
    "Qwen3.6-35B-A3B qkv": (9216, 2048),
    "Qwen3.6-35B-A3B qkvz": (12288, 2048),
    "Qwen3.6-35B-A3B ba": (64, 2048),
    "Qwen3.6-35B-A3B out": (2048, 4096),
    "Qwen3.6-35B-A3B router": (256, 2048),
}
"""(outputs, inputs)."""


def _case(name: str, rows: int) -> Case:
    outputs, inputs = SHAPES[name]

    def arguments(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) * inputs**-0.5
        return x, weight, counters(outputs, device)

    return Case(
        LINEAR,
        f"{name}, {rows} rows",
        arguments,
        bytes=2 * (rows * inputs + outputs * inputs + rows * outputs),
        flops=2 * rows * outputs * inputs,
    )


CASES = tuple(_case(name, rows) for name in SHAPES for rows in (1, MOST_ROWS))
