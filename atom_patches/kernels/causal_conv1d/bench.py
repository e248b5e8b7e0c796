"""The causal convolution at the shape of Qwen3.6-35B-A3B: 8192 channels, 4 taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import CAUSAL_CONV1D, CAUSAL_CONV1D_HALO, CAUSAL_CONV1D_UPDATE, CAUSAL_CONV1D_VERIFY

CHANNELS, TAPS, DRAFT, POOL = 8192, 4, 4, 512
ITEM = 2  # bytes of a bfloat16
STATE = CHANNELS * (TAPS - 1) * ITEM

Draw = Callable[..., Tensor]


def _draw(device: torch.device) -> Draw:
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)


def _head(draw: Draw, rows: int) -> tuple[Tensor, Tensor, None]:
    return draw(rows, CHANNELS), draw(CHANNELS, TAPS), None


def _slots(device: torch.device, count: int) -> Tensor:
    return (torch.randperm(POOL - 1, generator=torch.Generator().manual_seed(0))[:count] + 1).int().to(device)


def _cu(device: torch.device, lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _moved(rows: int, states: int) -> float:
    return 2 * rows * CHANNELS * ITEM + CHANNELS * TAPS * ITEM + states * STATE


def _work(rows: int) -> float:
    return rows * CHANNELS * (2 * TAPS + 4)


def _prefill(label: str, lengths: list[int]) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        draw, resumed = _draw(device), torch.ones(len(lengths), dtype=torch.bool, device=device)
        state = draw(POOL, TAPS - 1, CHANNELS).mT
        return (
            *_head(draw, sum(lengths)), _cu(device, lengths), state, _slots(device, len(lengths)), resumed, "silu", 0,
        )  # fmt: skip

    rows = sum(lengths)
    return Case(CAUSAL_CONV1D, label, inputs, bytes=_moved(rows, 2 * len(lengths)), flops=_work(rows))


def _halo(label: str, lengths: list[int]) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        draw = _draw(device)
        halo = draw(len(lengths), TAPS - 1, CHANNELS)
        return *_head(draw, sum(lengths)), _cu(device, lengths), halo, "silu"

    rows = sum(lengths)
    return Case(CAUSAL_CONV1D_HALO, label, inputs, bytes=_moved(rows, 2 * len(lengths)), flops=_work(rows))


def _update(rows: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        draw = _draw(device)
        return *_head(draw, rows), draw(POOL, TAPS - 1, CHANNELS).mT, _slots(device, rows), "silu", 0

    return Case(CAUSAL_CONV1D_UPDATE, f"{rows} rows", inputs, bytes=_moved(rows, 2 * rows), flops=_work(rows))


def _verify(seqs: int) -> Case:
    rows, places = seqs * DRAFT, TAPS - 2 + DRAFT

    def inputs(device: torch.device) -> tuple[Any, ...]:
        draw = _draw(device)
        state = draw(POOL, places, CHANNELS).mT
        accepted = torch.full((seqs,), 2, dtype=torch.int32, device=device)
        cu = _cu(device, [DRAFT] * seqs)
        return *_head(draw, rows), cu, state, _slots(device, seqs), accepted, "silu", 0

    moved = _moved(rows, 0) + seqs * CHANNELS * (TAPS - 1 + places) * ITEM
    return Case(CAUSAL_CONV1D_VERIFY, f"{seqs} drafts of {DRAFT}", inputs, bytes=moved, flops=_work(rows))


CASES = (
    *(_update(rows) for rows in (1, 16, 64, 256)),
    *(_verify(seqs) for seqs in (1, 16, 64)),
    _prefill("4096 rows", [4096]),
    _prefill("16384 rows", [16384]),
    _prefill("16384 rows in 32 sequences", [512] * 32),
    _halo("8192 rows of a rank, in 2 pieces", [4096, 4096]),
)
