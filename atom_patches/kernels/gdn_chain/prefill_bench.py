"""Benchmark shapes of `gdn_prefill`: the GatedDeltaNet layers of Qwen3.6-35B-A3B."""

from __future__ import annotations

from typing import Any

import torch

from atom_patches.kernels.benchmark import Case
from atom_patches.kernels.gated_delta_rule.chunk_bench import KEY_HEADS, SIZE, VALUE_HEADS, offsets, ragged, work

from .prefill import GDN_PREFILL, GDN_PREFILL_SEGMENT

TAPS = 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE


def _case(label: str, lengths: list[int], *, segment: bool = False) -> Case:
    total, count = sum(lengths), len(lengths)

    def inputs(device: torch.device) -> tuple[Any, ...]:
        torch.manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        a, b = normal(total, VALUE_HEADS), normal(total, VALUE_HEADS)
        weight = normal(CHANNELS, TAPS) * TAPS**-0.5
        conv_state = normal(count + 1, TAPS - 1, CHANNELS).mT
        ssm_state = torch.randn(count + 1, VALUE_HEADS, SIZE, SIZE, device=device)
        slots = torch.arange(1, count + 1, device=device, dtype=torch.int32)
        resumed = torch.arange(count, device=device) % 2 == 0
        decay_log = torch.rand(VALUE_HEADS, device=device).mul(16).add(1e-3).log()
        cu_seqlens, bias = offsets(lengths, device), torch.ones(VALUE_HEADS, device=device)
        before = normal(total, CHANNELS), a, b, weight, None, conv_state
        after = slots, resumed, cu_seqlens, decay_log, bias
        if segment:
            return *before, *after, KEY_HEADS, SIZE, 1e-6, "silu", 0
        return *before, ssm_state, *after, SIZE**-0.5, 1e-6, "silu", 0

    _, flops = work(total, count)
    states = 2 * count * (4 * VALUE_HEADS * SIZE * SIZE + 2 * CHANNELS * (TAPS - 1))
    moved = float(2 * total * (CHANNELS + 2 * VALUE_HEADS + VALUE_HEADS * SIZE) + states + 2 * CHANNELS * TAPS)
    operation = GDN_PREFILL_SEGMENT if segment else GDN_PREFILL
    return Case(operation, label, inputs, bytes=moved, flops=flops + 2.0 * TAPS * CHANNELS * total)


CASES = (
    _case("16384 rows, 1 sequence", [16384]),
    _case("4096 rows, 1 sequence", [4096]),
    _case("16384 rows, 8 sequences", [2048] * 8),
    _case("8192 rows, 64 ragged sequences", ragged(64, 8192)),
    _case("2048 rows, 32 ragged sequences", ragged(32, 2048)),
    _case("16384 rows, 1 segment", [16384], segment=True),
)
