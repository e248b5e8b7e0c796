"""Paged attention at the shape of Qwen3.6-35B-A3B (16 heads over 2, of 256) and of a usual dense model (32/8, of 128).

Pages lie in the cache in random order. The block size is the engine's: 16, and for the hybrid model 784.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import PAGED_ATTENTION

HYBRID = (16, 2, 256, 784)
DENSE = (32, 8, 128, 16)
"""Query heads, key heads, head size, block size."""


def _inputs(shape: tuple[int, int, int, int], seqs: int, rows: int, keys: int, device: torch.device) -> tuple[Any, ...]:
    """`seqs` sequences of `keys` keys, whose last `rows` are queried."""
    heads, kv_heads, size, block_size = shape
    generator = torch.Generator(device if device.type != "meta" else "cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        if device.type == "meta":
            return torch.empty(shape, dtype=torch.bfloat16, device=device)
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    blocks = -(-keys // block_size)
    table = torch.randperm(seqs * blocks, dtype=torch.int32).view(seqs, blocks).to(device)
    starts = torch.arange(0, seqs * rows + 1, rows, dtype=torch.int32).to(device)
    lengths = torch.full((seqs,), keys, dtype=torch.int32).to(device)
    cache = normal(2, seqs * blocks, block_size, kv_heads, size)
    q = normal(seqs * rows, heads, size)
    return (
        q, cache[0], cache[1], table, starts, lengths, rows, keys, size**-0.5, True, None, 0.0, None, None, None, False,
    )  # fmt: skip


def _case(name: str, shape: tuple[int, int, int, int], seqs: int, rows: int, keys: int) -> Case:
    heads, kv_heads, size, _ = shape
    pairs = seqs * (rows * (keys - rows) + rows * (rows + 1) // 2)
    return Case(
        PAGED_ATTENTION,
        f"{name} {heads}/{kv_heads} d{size}, {seqs} x {rows} rows, {keys} keys",
        partial(_inputs, shape, seqs, rows, keys),
        bytes=2 * seqs * (2 * rows * heads * size + 2 * keys * kv_heads * size) + 4 * seqs * rows * heads,
        flops=4 * pairs * heads * size,
    )


def _cases(shape: tuple[int, int, int, int]) -> tuple[Case, ...]:
    return (
        *(_case("decode", shape, seqs, 1, keys) for keys in (4096, 16384) for seqs in (1, 16, 64)),
        *(_case("prefill", shape, 1, rows, rows) for rows in (4096, 16384)),
        _case("chunk", shape, 1, 4096, 61440),
    )


CASES = _cases(HYBRID) + _cases(DENSE)
