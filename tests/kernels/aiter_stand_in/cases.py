"""Calls that the bindings must serve, one or more for every AITER function that a binding knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation

Draw = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A call, and whether the older lane serves it too: "" or the reason why not, in part.

    Attributes:
        prepared: what the caller of the operator has to do once.
    """

    operation: Operation
    label: str
    arguments: Draw
    older: str = ""
    prepared: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

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


def _attention() -> list[Case]:
    from atom_patches.kernels.paged_attention import PAGED_ATTENTION

    def call(page: int, causal: bool, window: int | None, cap: float, rows: int = 9) -> tuple[Any, ...]:
        q, caches = normal(rows, 4, 64), normal(5, 2, page, 2, 64, seed=1)
        if page == 16:
            caches = normal(5, page, 2, 2, 64, seed=1).transpose(1, 2)  # keys beside values
        table = torch.tensor([[3, 0, 4], [2, 1, 0], [1, 0, 0], [4, 4, 4]])[:, : 3 if page > 1 else 2]
        starts = torch.tensor([0, 5, 6, 6, 8]).clamp(max=rows)
        lengths = torch.tensor([37, 16, 3, 0]) if page > 1 else torch.tensor([2, 2, 1, 0])
        if not causal:
            lengths = torch.tensor([3, 17, 3, 1]) if page > 1 else lengths
        return (
            q, caches[:, 0], caches[:, 1], table, starts, lengths, 5, int(lengths.max()), 0.125, causal, window, cap,
            None, None, None, True,
        )  # fmt: skip

    missing = "has no parameter (block_table, seqlen_k)"
    return [
        Case(PAGED_ATTENTION, "pages of 16", lambda: call(16, True, None, 0.0), missing),
        Case(PAGED_ATTENTION, "pages of 1, more rows than keys", lambda: call(1, True, None, 0.0), missing),
        Case(PAGED_ATTENTION, "window and soft cap", lambda: call(16, True, 4, 2.0), missing),
        Case(PAGED_ATTENTION, "every key", lambda: call(16, False, None, 0.0), missing),
        Case(PAGED_ATTENTION, "no rows", lambda: call(16, True, None, 0.0, rows=0), missing),
    ]


def _latents() -> list[Case]:
    from atom_patches.kernels.mla_attention import OPERATIONS

    dense, sparse, write = (next(o for o in OPERATIONS if o.name == name) for name in (
        "mla_attention", "sparse_mla_attention", "mla_cache_write"))  # fmt: skip

    def decode(rows: int) -> tuple[Any, ...]:
        starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32).clamp(max=rows)
        table = torch.tensor([[2, 0], [1, 1], [0, 3]], dtype=torch.int32)
        return (normal(rows, 16, 576), normal(4, 2, 576, seed=1), table, starts,
                torch.tensor([3, 2, 4], dtype=torch.int32), 1, 4, 0.04, None, 512)  # fmt: skip

    def chosen(rows: int) -> tuple[Any, ...]:
        indices = torch.tensor([[5, -1, 0, 7], [-1, -1, -1, -1], [2, 1, 3, 6]], dtype=torch.int32)[:rows]
        return normal(rows, 16, 576), normal(4, 2, 576, seed=1), indices, 0.04, None, 512

    def rows_of(tokens: int) -> tuple[Any, ...]:
        slots = torch.tensor([7, -1, 0, 4])[:tokens]
        return normal(tokens, 24)[:, :16], normal(tokens, 8, seed=1), slots, normal(5, 2, 24, seed=2)[:4], None

    missing = "has no parameter (return_lse)"
    return [
        Case(dense, "one row a sequence", lambda: decode(3), missing),
        Case(dense, "no rows", lambda: decode(0), missing),
        Case(sparse, "scattered", lambda: chosen(3), missing),
        Case(sparse, "no rows", lambda: chosen(0), missing),
        Case(write, "bfloat16", lambda: rows_of(4)),
        Case(write, "no rows", lambda: rows_of(0)),
    ]


def _indexer() -> list[Case]:
    from atom_patches.kernels.sparse_indexer import OPERATIONS

    by_name = {operation.name: operation for operation in OPERATIONS}
    fp8 = torch.float8_e4m3fn

    def cache(page: int) -> Tensor:
        values = normal(5, page * 128, seed=9).to(fp8).view(torch.uint8)
        scales = torch.rand(5, page, generator=torch.Generator().manual_seed(8)).view(torch.uint8)
        return torch.cat([values, scales], 1).view(5, page, 132)

    def write(tokens: int) -> tuple[Any, ...]:
        return normal(tokens, 128) * 7, torch.tensor([19, -1, 0, 6])[:tokens], cache(4), True

    def gather(total: int) -> tuple[Any, ...]:
        table = torch.tensor([[3, 1], [0, 4], [2, 2]], dtype=torch.int32)
        return cache(4), table, torch.tensor([0, 5, 11], dtype=torch.int32).clamp(max=total), total

    def logits(rows: int) -> tuple[Any, ...]:
        start, end = (
            torch.tensor([0, 3, 2], dtype=torch.int32)[:rows],
            torch.tensor([7, 3, 6], dtype=torch.int32)[:rows],
        )
        q, key, weights = normal(rows, 8, 16).to(fp8), normal(7, 16, seed=1).to(fp8), normal(rows, 8).float()
        return q, key, torch.rand(7, generator=torch.Generator().manual_seed(7)), weights, start, end

    def paged(requests: list[int] | None) -> tuple[Any, ...]:
        q, weights = normal(3, 8, 128).to(fp8), normal(3, 8, seed=1).float()
        table = torch.tensor([[3, 1, 4], [0, 4, 2], [2, 4, 1]], dtype=torch.int32)
        chosen = None if requests is None else torch.tensor(requests, dtype=torch.int32)
        if requests is not None:
            table[0] = 2**30  # request 0 has no token yet: whose block table padding is given must not be read
        return q, cache(1), weights, table, chosen, torch.tensor([3, 0, 2], dtype=torch.int32), 4

    return [
        Case(by_name["indexer_cache_write"], "powers of two", lambda: write(4)),
        Case(by_name["indexer_cache_write"], "no rows", lambda: write(0)),
        Case(by_name["indexer_cache_gather"], "as many as there are", lambda: gather(11)),
        Case(by_name["indexer_cache_gather"], "more than there are", lambda: gather(30)),
        Case(by_name["indexer_cache_gather"], "no rows", lambda: gather(0)),
        Case(by_name["indexer_logits"], "ragged", lambda: logits(3)),
        Case(by_name["indexer_logits"], "no rows", lambda: logits(0)),
        Case(by_name["indexer_logits_paged"], "a query a request", lambda: paged(None)),
        Case(by_name["indexer_logits_paged"], "queries of requests", lambda: paged([2, 0, -1])),
    ]


@contextlib.contextmanager
def copies_kept() -> Iterator[None]:
    from atom_patches.kernels.fused_moe import aiter_impl

    aiter_impl.keep_copies(True)
    try:
        yield
    finally:
        aiter_impl.keep_copies(False)


def _experts() -> list[Case]:
    from atom_patches.kernels.fused_moe import FUSED_MOE, MOE_ROUTING

    def route(renormalize: bool, rows: int = 3, odd: float = 0.0) -> tuple[Any, ...]:
        logits = normal(rows, 24, dtype=torch.float32)[:, :12]
        logits[1:2] += odd
        return logits, 3, "softmax", renormalize, None, 1, 1, 2.5

    def call(shared: bool, gated: bool, rows: int = 4) -> tuple[Any, ...]:
        weights = torch.rand(rows, 2, generator=torch.Generator().manual_seed(4))
        ids = torch.tensor([[2, 0], [1, 2], [-1, 1], [-1, -1]])[:rows]
        w13, w2 = normal(3, 64, 64, seed=1) / 8, normal(3, 64, 32, seed=2) / 6
        x = normal(rows, 128)[:, ::2]
        always = (normal(128, 64, seed=3) / 8, normal(64, 64, seed=5) / 8) if shared else (None, None)
        return x, w13, w2, weights, ids, None, *always, normal(64, seed=6) / 8 if gated else None

    return [
        Case(MOE_ROUTING, "renormalised", lambda: route(True)),
        Case(MOE_ROUTING, "as they are", lambda: route(False)),
        Case(MOE_ROUTING, "a row of NaN", lambda: route(True, odd=torch.nan)),
        Case(MOE_ROUTING, "a row of -inf", lambda: route(False, odd=-torch.inf)),
        Case(MOE_ROUTING, "no rows", lambda: route(True, 0)),
        Case(FUSED_MOE, "routed", lambda: call(False, False), prepared=copies_kept),
        Case(FUSED_MOE, "with a gated shared expert", lambda: call(True, True), prepared=copies_kept),
        Case(FUSED_MOE, "no rows", lambda: call(True, False, 0), prepared=copies_kept),
    ]


def _gated_delta() -> list[Case]:
    from atom_patches.kernels.gated_delta_rule.chunk import OPERATIONS as CHUNKED
    from atom_patches.kernels.gdn_chain.decode import GDN_DECODE

    chunk = next(o for o in CHUNKED if o.name == "chunk_gated_delta_rule")

    def prefill(resumed: bool, rows: int = 7) -> tuple[Any, ...]:
        q, k = (torch.nn.functional.normalize(normal(rows, 1, 64, seed=s), dim=-1) for s in (0, 1))
        g = -torch.rand(rows, 2, generator=torch.Generator().manual_seed(2)) * 2
        g[1:2, 0] = -torch.inf
        beta = normal(rows, 2, seed=3).sigmoid()
        starts = torch.tensor([1, 1, 4, 4, 6], dtype=torch.int32).clamp(max=rows)
        state = normal(4, 2, 64, 64, seed=4, dtype=torch.float32) if resumed else None
        return q, k, normal(rows, 2, 128, seed=5)[:, :, ::2], g, beta, starts, state, 0.125, 64

    def decode(slots: list[int], state_dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        rows, channels = len(slots), 2 * 16 + 4 * 8
        return (
            normal(rows, channels + 4)[:, :channels], normal(rows, 4, seed=1), normal(rows, 4, seed=2),
            normal(channels, 4, seed=3) / 2, None, normal(4, 3, channels, seed=4).mT,
            normal(4, 5, 8, 8, seed=5, dtype=state_dtype)[:, :4], torch.tensor(slots),
            normal(4, seed=6, dtype=torch.float32), normal(4, seed=7), 8**-0.5, 1e-6, "silu", 0,
        )  # fmt: skip

    missing = "has no module aiter.ops.triton."
    return [
        Case(chunk, "resumed, with empty sequences", lambda: prefill(True), missing),
        Case(chunk, "from nothing", lambda: prefill(False), missing),
        Case(chunk, "no rows", lambda: prefill(True, 0), missing),
        Case(GDN_DECODE, "float32 states", lambda: decode([3, 0, 1, -1]), missing),
        Case(GDN_DECODE, "bfloat16 states", lambda: decode([2, 3], torch.bfloat16), missing),
        Case(GDN_DECODE, "no rows", lambda: decode([]), missing),
    ]


CASES: list[Case] = [
    *_norms(), *_convolutions(), *_rope(), *_attention(), *_latents(), *_indexer(), *_experts(), *_gated_delta(),
]  # fmt: skip
