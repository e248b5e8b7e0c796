"""Calls that the bindings must serve, one or more for every AITER function that a binding knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation

Draw = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A call, and whether the older lane serves it too: "" or the reason why not, in part."""

    operation: Operation
    label: str
    arguments: Draw
    older: str = ""

    def __str__(self) -> str:
        return f"{self.operation.name}: {self.label}"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _norms() -> list[Case]:
    from atom_patches.kernels.add_rms_norm import OPERATIONS as ADD
    from atom_patches.kernels.rms_norm import RMS_NORM

    (add,) = ADD
    missing = "has no aiter.ops.rmsnorm:rms_norm_opus"
    return [
        Case(RMS_NORM, "2-d", lambda: (normal(3, 8), normal(8, seed=1), 1e-6, False)),
        Case(RMS_NORM, "3-d rows of a wider tensor", lambda: (normal(3, 4, 16)[..., 3:11], normal(8), 1e-6, False)),
        Case(RMS_NORM, "gemma", lambda: (normal(3, 8), normal(8, seed=1), 1e-6, True), missing),
        Case(RMS_NORM, "no rows", lambda: (normal(0, 8), normal(8, seed=1), 1e-6, False)),
        Case(add, "2-d", lambda: (normal(3, 8), normal(3, 8, seed=1), normal(8, seed=2), 1e-6, False)),
        Case(add, "strided", lambda: (normal(8, 3).T, normal(3, 16)[:, ::2], normal(8, seed=2), 1e-6, False)),
        Case(
            add,
            "gemma",
            lambda: (normal(3, 8), normal(3, 8, seed=1), normal(8, seed=2), 1e-6, True),
            "has no parameter (gemma_norm)",
        ),
        Case(add, "no rows", lambda: (normal(0, 8), normal(0, 8), normal(8), 1e-6, False)),
    ]


def _convolutions() -> list[Case]:
    from atom_patches.kernels.causal_conv1d import CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE

    missing = "has no module aiter.ops.triton.conv.causal_conv1d"

    def prefill(dtype: torch.dtype, taps: int, bias: bool, resume: bool, null: int | None) -> tuple[Any, ...]:
        x = normal(14, 12, dtype=dtype)[:, :9]
        starts, slots = torch.tensor([1, 4, 4, 9, 12]), torch.tensor([2, 3, 0, 1])
        state = normal(4, 4, 9, seed=1, dtype=dtype).mT[:, :, :4]  # longer than the taps need
        resumed = torch.tensor([True, False, False, True]) if resume else None
        first = normal(9, seed=3, dtype=dtype) if bias else None
        return x, normal(9, taps, seed=2, dtype=dtype), first, starts, state, slots, resumed, "silu", null

    def update(slots: list[int], null: int | None, activation: str | None) -> tuple[Any, ...]:
        x, weight, bias = normal(len(slots), 12)[:, 2:11], normal(9, 4, seed=2), normal(9, seed=3)
        return x, weight, bias, normal(4, 9, 3, seed=1), torch.tensor(slots), activation, null

    return [
        Case(CAUSAL_CONV1D, "null slot 0", lambda: prefill(torch.bfloat16, 4, True, True, 0), missing),
        Case(CAUSAL_CONV1D, "no null slot", lambda: prefill(torch.float32, 2, False, False, None), missing),
        Case(CAUSAL_CONV1D, "no rows", lambda: (normal(0, 9), *prefill(torch.bfloat16, 4, True, True, 0)[1:3],
             torch.zeros(5, dtype=torch.int32), *prefill(torch.bfloat16, 4, True, True, 0)[4:]), missing),
        Case(CAUSAL_CONV1D_UPDATE, "null slot 0", lambda: update([3, 0, 1, -1, 2], 0, "silu"), missing),
        Case(CAUSAL_CONV1D_UPDATE, "no null slot", lambda: update([3, 0, -7], None, None), missing),
        Case(CAUSAL_CONV1D_UPDATE, "no rows", lambda: update([], 0, "silu"), missing),
    ]  # fmt: skip


def _rope() -> list[Case]:
    from atom_patches.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE

    def call(gated: bool, neox: bool, rotary: int, slots: list[int], tokens: int = 5) -> tuple[Any, ...]:
        qkv = normal(tokens, (4 * (2 if gated else 1) + 4) * 8 + 3)[:, : (4 * (2 if gated else 1) + 4) * 8]
        angles = torch.rand(9, rotary // 2, generator=torch.Generator().manual_seed(5)) * 6
        table = torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
        caches = normal(3, 2, 4, 2, 8, seed=7).transpose(2, 3).unbind(1)  # heads before rows, keys beside values
        positions = torch.tensor([8, 0, 3, 3, 1])[:tokens]
        weights = normal(8, seed=1) / 4, normal(8, seed=2) / 4
        return (qkv, positions, table, *weights, *(c.transpose(1, 2) for c in caches), torch.tensor(slots), None, None,
                4, 2, 8, 0.5, True, gated, neox, None, False)  # fmt: skip

    missing = "has no module aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache"
    return [
        Case(QK_NORM_ROPE_CACHE, "gated, partial", lambda: call(True, True, 4, [0, 5, -1, 1, 3]), missing),
        Case(QK_NORM_ROPE_CACHE, "full, pairs", lambda: call(False, False, 8, [5, 2, 0]), missing),
        Case(QK_NORM_ROPE_CACHE, "no rows", lambda: call(True, True, 4, [], tokens=0), missing),
    ]


CASES: list[Case] = [*_norms(), *_convolutions(), *_rope()]
