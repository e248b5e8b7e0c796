"""From projection to attention at the shape of Qwen3.6-35B-A3B: gated queries and Gemma's weights as there; and with
plain weights, for which the engines have norm kernels of their own."""

from __future__ import annotations

from typing import Any

import torch

from atom_patches.kernels.benchmark import Case

from . import QK_NORM_ROPE_CACHE

Q_HEADS, KV_HEADS, DIM, ROTARY = 16, 2, 256, 64
BLOCK, POSITIONS = 16, 32768
SECTION = [11, 11, 10]


def _case(
    tokens: int, *, gemma: bool = True, gated: bool = True, mrope: bool = False, cache: torch.dtype = torch.bfloat16
) -> Case:
    width = (Q_HEADS * (2 if gated else 1) + 2 * KV_HEADS) * DIM
    scaled = cache != torch.bfloat16

    def inputs(device: torch.device) -> tuple[Any, ...]:
        torch.manual_seed(0)
        qkv = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
        positions = torch.arange(tokens, device=device) % POSITIONS
        if mrope:
            positions = torch.stack([positions, positions // 2, positions // 3])
        angles = torch.arange(POSITIONS, device=device)[:, None] * 1e-2 ** torch.arange(ROTARY // 2, device=device)
        table = torch.cat([angles.cos(), angles.sin()], dim=1).to(torch.bfloat16)
        weights = [0.1 * torch.randn(DIM, dtype=torch.bfloat16, device=device) + (0 if gemma else 1) for _ in range(2)]
        blocks = -(-tokens // BLOCK) + 1
        caches = torch.zeros(2, blocks, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device=device).to(cache)
        slots = torch.arange(tokens, device=device) + BLOCK
        scales = [torch.full((1,), 0.5, device=device) if scaled else None for _ in range(2)]
        return (
            qkv, positions, table, *weights, caches[0], caches[1], slots, *scales, Q_HEADS, KV_HEADS, DIM, 1e-6, gemma,
            gated, True, SECTION if mrope else None, mrope,
        )  # fmt: skip

    options = [(gated, "gated"), (gemma, "gemma"), (mrope, "M-RoPE"), (scaled, "fp8 cache")]
    named = ", ".join(name for asked, name in options if asked) or "plain"
    out = (Q_HEADS * (2 if gated else 1) + KV_HEADS) * DIM * 2 + 2 * KV_HEADS * DIM * cache.itemsize
    return Case(
        QK_NORM_ROPE_CACHE,
        f"{tokens} tokens, {Q_HEADS} q and {KV_HEADS} kv heads of {DIM}, {named}",
        inputs,
        bytes=tokens * (2 * width + out + 2 * ROTARY + 16 + (16 if mrope else 0)) + 4 * DIM,
        flops=tokens * (Q_HEADS + KV_HEADS) * DIM * 8,
    )


CASES = (
    *(_case(tokens) for tokens in (1, 16, 64, 4096, 16384)),
    *(_case(tokens, gemma=False, gated=False) for tokens in (16, 16384)),
    *(_case(tokens, mrope=True) for tokens in (16, 16384)),
    *(_case(tokens, cache=torch.float8_e4m3fn) for tokens in (16, 16384)),
)
