"""Benchmark shapes of the chunked operators: the GatedDeltaNet layers of Qwen3.6-35B-A3B."""

from __future__ import annotations

from typing import Any

import torch

from atom_patches.kernels.benchmark import Case

from .chunk import CHUNK_GATED_DELTA_RULE, CHUNK_GATED_DELTA_RULE_SEGMENT

KEY_HEADS, VALUE_HEADS, SIZE, CHUNK = 16, 32, 128, 64


def ragged(count: int, total: int) -> list[int]:
    """`count` lengths of different sizes that add up to `total`."""
    weights = [1 + (7 * i) % 11 for i in range(count)]
    lengths = [max(1, total * weight // sum(weights)) for weight in weights]
    lengths[-1] += total - sum(lengths)
    return lengths


def offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    """[N + 1] int32 row offsets of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def work(total: int, count: int) -> tuple[float, float]:
    """Least bytes and floating-point operations of the rule: its arguments once, and the products of the chunked
    form with the triangular solve counted as one product."""
    token = 2 * (2 * KEY_HEADS * SIZE + 2 * VALUE_HEADS * SIZE) + 8 * VALUE_HEADS
    states = 2 * 4 * count * VALUE_HEADS * SIZE * SIZE
    chunked = 2 * VALUE_HEADS * (3 * SIZE * SIZE + CHUNK * (2 * SIZE + 2 * SIZE))
    return float(token * total + states), float(chunked * total)


def _case(label: str, lengths: list[int], *, segment: bool = False) -> Case:
    total, count = sum(lengths), len(lengths)

    def inputs(device: torch.device) -> tuple[Any, ...]:
        torch.manual_seed(0)
        q, k = torch.nn.functional.normalize(torch.randn(2, total, KEY_HEADS, SIZE, device=device), dim=-1).bfloat16()
        v = torch.randn(total, VALUE_HEADS, SIZE, device=device).bfloat16()
        g = -torch.rand(total, VALUE_HEADS, device=device)
        beta = torch.rand(total, VALUE_HEADS, device=device)
        cu_seqlens = offsets(lengths, device)
        if segment:
            return k, v, g, beta, cu_seqlens
        state = torch.randn(count, VALUE_HEADS, SIZE, SIZE, device=device)
        return q, k, v, g, beta, cu_seqlens, state, SIZE**-0.5, CHUNK

    moved, flops = work(total, count)
    operation = CHUNK_GATED_DELTA_RULE_SEGMENT if segment else CHUNK_GATED_DELTA_RULE
    return Case(operation, label, inputs, bytes=moved, flops=flops)


CASES = (
    _case("16384 rows, 1 sequence", [16384]),
    _case("4096 rows, 1 sequence", [4096]),
    _case("16384 rows, 8 sequences", [2048] * 8),
    _case("8192 rows, 64 ragged sequences", ragged(64, 8192)),
    _case("2048 rows, 32 ragged sequences", ragged(32, 2048)),
    _case("16384 rows, 1 segment", [16384], segment=True),
)
