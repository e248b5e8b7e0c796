"""Merging two and four parts at the shape of Qwen3.6-35B-A3B: 16 heads of 256."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from atom_patches.kernels.benchmark import Case

from . import MERGE_ATTENTION, MERGE_ATTENTION_PARTS

HEADS, SIZE = 16, 256


def _two(rows: int, device: torch.device) -> tuple[Any, ...]:
    outs, lses = _parts(2, rows, device)
    return outs[0], lses[0], outs[1], lses[1]


def _parts(parts: int, rows: int, device: torch.device) -> tuple[Any, ...]:
    generator = torch.Generator(device if device.type != "meta" else "cpu").manual_seed(0)
    outs = torch.empty(parts, rows, HEADS, SIZE, dtype=torch.bfloat16, device=device)
    lses = torch.empty(parts, HEADS, rows, dtype=torch.float32, device=device)
    if device.type != "meta":
        outs.normal_(generator=generator)
        lses.normal_(generator=generator)
    return outs, lses.mT


def _bytes(parts: int, rows: int) -> int:
    return (parts + 1) * rows * HEADS * (2 * SIZE + 4)


CASES = tuple(
    Case(
        MERGE_ATTENTION, f"2 parts of {rows} x {HEADS} x {SIZE} bf16", partial(_two, rows),
        bytes=_bytes(2, rows), flops=4 * rows * HEADS * SIZE,
    )
    for rows in (1, 64, 4096, 16384)
) + tuple(
    Case(
        MERGE_ATTENTION_PARTS, f"4 parts of {rows} x {HEADS} x {SIZE} bf16", partial(_parts, 4, rows),
        bytes=_bytes(4, rows), flops=8 * rows * HEADS * SIZE,
    )
    for rows in (64, 4096)
)  # fmt: skip
