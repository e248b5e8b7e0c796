"""Latent attention at the shapes of DeepSeek-V3.2: 128 heads on one GPU or 16 on each of eight, a latent of 512 and a
rope part of 64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import MLA_ATTENTION, MLA_CACHE_WRITE, SPARSE_MLA_ATTENTION
from .layout import packed_bytes

HEADS, LATENT, ROPE, PAGE, TOPK = 128, 512, 64, 64, 2048
WIDE = LATENT + ROPE
SCALE = (128 + 64) ** -0.5
ROW_BYTES = {"plain": 2 * WIDE, "scaled": WIDE, "packed": packed_bytes(LATENT, ROPE)}


def _generator(device: torch.device) -> torch.Generator | None:
    return None if device.type == "meta" else torch.Generator(device).manual_seed(0)


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=_generator(device))


def _cache(device: torch.device, blocks: int, layout: str) -> tuple[Tensor, Tensor | None]:
    """A filled cache; what it holds was quantised by hand, so that no provider is needed to make it."""
    values = _normal(device, blocks, PAGE, WIDE)
    if layout == "plain":
        return values, None
    if layout == "scaled":
        scale = torch.full((1,), 1 / 64, device=device)
        return (values * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale
    scales = torch.full((blocks, PAGE, LATENT // 128), 1 / 64, device=device).view(torch.uint8)
    quantised = (values[..., :LATENT] * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([quantised, scales, values[..., LATENT:].contiguous().view(torch.uint8)], dim=-1), None


def _dense(batch: int, context: int, queries: int, layout: str, heads: int = HEADS) -> Case:
    pages = context // PAGE

    def inputs(device: torch.device) -> tuple[Any, ...]:
        cache, cache_scale = _cache(device, batch * pages, layout)
        order = torch.randperm(batch * pages, device=device, generator=_generator(device), dtype=torch.int32)
        starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=device)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        q = _normal(device, batch * queries, heads, WIDE)
        table = order.view(batch, pages)
        return q, cache, table, starts, lengths, queries, context, SCALE, cache_scale, LATENT

    rows = batch * queries * heads
    seen = queries * context - queries * (queries - 1) / 2
    return Case(
        MLA_ATTENTION,
        f"{batch} x {queries} over {context}, {heads} heads, {layout}",
        inputs,
        bytes=batch * context * ROW_BYTES[layout] + 2 * rows * (WIDE + LATENT) + 4 * rows,
        flops=2 * batch * heads * seen * (WIDE + LATENT),
        note="vLLM plans its kernel once a step for all layers, but here in every call." if layout == "plain" else "",
    )


def _sparse(rows: int, context: int, layout: str, heads: int = HEADS) -> Case:
    """Every query has its own request of `context` tokens up to 64 rows; more rows share one."""
    requests = rows if rows <= 64 else 1

    def inputs(device: torch.device) -> tuple[Any, ...]:
        cache, cache_scale = _cache(device, requests * context // PAGE, layout)
        if device.type == "meta":
            indices = torch.empty(rows, TOPK, dtype=torch.int32, device=device)
        else:
            noise = torch.rand(rows, context, device=device, generator=_generator(device))
            local = noise.topk(TOPK, dim=1).indices.sort(dim=1).values
            own = torch.arange(rows, device=device)[:, None] * (context if requests > 1 else 0)
            indices = (local + own).int()
        return _normal(device, rows, heads, WIDE), cache, indices, SCALE, cache_scale, LATENT

    touched = min(rows * TOPK, requests * context)
    return Case(
        SPARSE_MLA_ATTENTION,
        f"{rows} x {TOPK} of {context}, {heads} heads, {layout}",
        inputs,
        bytes=touched * ROW_BYTES[layout] + 4 * rows * TOPK + 2 * rows * heads * (WIDE + LATENT) + 4 * rows * heads,
        flops=2 * rows * heads * TOPK * (WIDE + LATENT),
    )


def _write(rows: int, layout: str) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        blocks = 2 * rows // PAGE + 1
        size = ROW_BYTES[layout] if layout == "packed" else WIDE
        dtype = torch.bfloat16 if layout == "plain" else torch.uint8
        cache = torch.zeros(blocks, PAGE, size, dtype=dtype, device=device)
        slots = torch.randperm(blocks * PAGE, device=device, generator=_generator(device))[:rows]
        scale = torch.full((1,), 1 / 64, device=device) if layout == "scaled" else None
        return _normal(device, rows, LATENT), _normal(device, rows, ROPE), slots, cache, scale

    moved = rows * (2 * WIDE + ROW_BYTES[layout] + 8)
    return Case(MLA_CACHE_WRITE, f"{rows} rows, {layout}", inputs, bytes=moved, flops=4 * rows * WIDE)


CASES = (
    *(_dense(batch, context, 1, "plain") for batch in (1, 16, 64) for context in (4096, 16384)),
    _dense(1, 65536, 1, "plain"),
    _dense(16, 65536, 1, "plain"),
    _dense(16, 16384, 1, "scaled"),
    _dense(16, 16384, 1, "packed"),
    _dense(16, 16384, 1, "plain", heads=16),
    _dense(16, 16384, 4, "plain", heads=16),
    _dense(1, 4096, 4096, "plain"),
    *(
        _sparse(rows, context, "packed", heads)
        for heads in (128, 16)
        for rows in (1, 16, 64)
        for context in (8192, 32768, 131072)
    ),
    *(_sparse(rows, 32768, "plain", heads) for heads in (128, 16) for rows in (1, 16, 64)),
    *(_sparse(rows, 32768, "scaled", heads=16) for rows in (16, 64)),
    *(_sparse(4096, 16384, layout, heads) for layout in ("plain", "packed") for heads in (128, 16)),
    *(_write(rows, layout) for layout in ("plain", "scaled", "packed") for rows in (16, 4096)),
)
