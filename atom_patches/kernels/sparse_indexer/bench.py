"""The sparse indexer at the shape of DeepSeek-V3.2: 64 heads of 128, the 2048 best tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.benchmark import Case

from . import (
    INDEXER_CACHE_GATHER,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_PAGED,
    INDEXER_QUERIES,
    LOCAL_TO_PAGED,
    TOPK_INDICES,
)

HEADS, SIZE, ROPE, PAGE, TOPK = 64, 128, 64, 64, 2048
CONTEXTS = (4096, 8192, 32768, 131072)


def _generator(device: torch.device) -> torch.Generator | None:
    return None if device.type == "meta" else torch.Generator(device).manual_seed(0)


def _normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device, generator=_generator(device))


def _fp8(device: torch.device, *shape: int) -> Tensor:
    return _normal(device, *shape, dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def _permutation(device: torch.device, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randperm(count, device=device, generator=_generator(device), dtype=dtype)


def _cache(device: torch.device, blocks: int) -> Tensor:
    values = _fp8(device, blocks, PAGE * SIZE).view(torch.uint8)
    scales = torch.full((blocks, PAGE), 1 / 64, device=device).view(torch.uint8)
    return torch.cat([values, scales], dim=1).view(blocks, PAGE, SIZE + 4)


def _queries(rows: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        q = _normal(device, rows, HEADS, SIZE, dtype=torch.bfloat16)
        angles = _normal(device, rows, ROPE // 2)
        return q, _normal(device, rows, HEADS), angles.cos(), angles.sin(), False

    moved = rows * (HEADS * (3 * SIZE + 8) + 4 * ROPE)
    return Case(INDEXER_QUERIES, f"{rows} rows", inputs, bytes=moved, flops=2 * rows * HEADS * SIZE * SIZE)


def _write(rows: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        blocks = 2 * rows // PAGE + 1
        slots = _permutation(device, blocks * PAGE, torch.int64)[:rows]
        cache = torch.zeros(blocks, PAGE, SIZE + 4, dtype=torch.uint8, device=device)
        return _normal(device, rows, SIZE, dtype=torch.bfloat16), slots, cache, True

    return Case(INDEXER_CACHE_WRITE, f"{rows} rows", inputs, bytes=rows * (3 * SIZE + 12), flops=3 * rows * SIZE)


def _gather(requests: int, context: int) -> Case:
    total = requests * context

    def inputs(device: torch.device) -> tuple[Any, ...]:
        table = _permutation(device, total // PAGE).view(requests, context // PAGE)
        bounds = torch.arange(0, total + 1, context, dtype=torch.int32, device=device)
        return _cache(device, total // PAGE), table, bounds, total

    return Case(INDEXER_CACHE_GATHER, f"{requests} x {context}", inputs, bytes=2 * total * (SIZE + 4), flops=0)


def _ragged(tokens: int, prefix: int) -> Case:
    columns = prefix + tokens

    def inputs(device: torch.device) -> tuple[Any, ...]:
        end = torch.arange(prefix + 1, columns + 1, dtype=torch.int32, device=device)
        key_scale = torch.full((columns,), 1 / 64, device=device)
        q, key, weights = _fp8(device, tokens, HEADS, SIZE), _fp8(device, columns, SIZE), _normal(device, tokens, HEADS)
        return q, key, key_scale, weights, torch.zeros_like(end), end

    seen = tokens * prefix + tokens * (tokens + 1) / 2
    return Case(
        INDEXER_LOGITS,
        f"{tokens} after {prefix}",
        inputs,
        bytes=tokens * HEADS * (SIZE + 4) + columns * (SIZE + 4) + 4 * tokens * columns,
        flops=2 * seen * HEADS * (SIZE + 1),
    )


def _paged(batch: int, context: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        table = _permutation(device, batch * context // PAGE).view(batch, context // PAGE)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        q, weights = _fp8(device, batch, HEADS, SIZE), _normal(device, batch, HEADS)
        return q, _cache(device, batch * context // PAGE), weights, table, None, lengths, context

    return Case(
        INDEXER_LOGITS_PAGED,
        f"{batch} over {context}",
        inputs,
        bytes=batch * context * (SIZE + 8) + batch * HEADS * (SIZE + 4),
        flops=2 * batch * context * HEADS * (SIZE + 1),
        note="The engine's time holds its plan, which vLLM makes once a step.",
    )


def _distinct(device: torch.device, rows: int, columns: int) -> Tensor:
    """Rows of normal quantiles in any order: engines do not say which of equal logits they take, so there are none."""
    order = torch.rand(rows, columns, device=device, generator=_generator(device)).argsort(dim=1)
    return torch.special.ndtri((order + 0.5) / columns)


def _topk(rows: int, columns: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        lengths = torch.full((rows,), columns, dtype=torch.int32, device=device)
        return _distinct(device, rows, columns), None, lengths, TOPK, False

    return Case(
        TOPK_INDICES,
        f"{TOPK} of {columns}, {rows} rows",
        inputs,
        bytes=4 * rows * (columns + TOPK),
        flops=0,
        note="In any order.",
    )


def _local(rows: int, page: int = PAGE) -> Case:
    """In tables of single tokens every query has its row, as SGLang has it."""

    def inputs(device: torch.device) -> tuple[Any, ...]:
        blocks = 65536 // page
        table = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        indices = _permutation(device, 65536)[:TOPK].expand(rows, TOPK).contiguous()
        requests = None if page == 1 else torch.arange(rows, dtype=torch.int32, device=device)
        return indices, requests, table, page

    label = f"{rows} x {TOPK}" + (", single tokens" if page == 1 else "")
    return Case(LOCAL_TO_PAGED, label, inputs, bytes=12 * rows * TOPK, flops=0)


CASES = (
    *(_queries(rows) for rows in (1, 16, 64, 4096)),
    *(_write(rows) for rows in (1, 16, 64, 4096)),
    _gather(1, 65536),
    _gather(16, 4096),
    _ragged(4096, 0),
    _ragged(4096, 12288),
    _ragged(4096, 28672),
    *(_paged(batch, context) for batch in (1, 16, 64) for context in CONTEXTS),
    *(_topk(rows, columns) for rows in (1, 16, 64) for columns in CONTEXTS),
    _topk(4096, 4096),
    _topk(2048, 16384),
    *(_local(rows) for rows in (1, 64, 1024)),
    *(_local(rows, page=1) for rows in (1, 64)),
)
