"""Routing and experts in Triton.

The experts are four kernels: the pairs of token and expert are sorted by expert and cut into row blocks of one expert
each (not for few pairs: there every program finds its own rows); the first product with silu(gate) * up; the second
product with the routing weight; the sum over a token's experts. A row of the products belongs to a pair, by the
pair's number, so nothing is ever moved into sorted order, and the sum runs over a token's experts in their order:
two runs give the same bits. A shared expert's rows are row blocks like the others, in front of them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom_patches.kernels import launch
from atom_patches.kernels.assembler import jit
from atom_patches.kernels.registry import YES, Verdict, no

from .tuned import MOST_UNSORTED, Config, Shape, Tile, config_for

LARGEST_ROUTER = 1024
"""Experts, groups and each group rounded up to powers of two, that a program holds in registers."""

ONE_A_PROGRAM = 1024
"""Tokens up to which each is routed by a program of its own."""

COUNTED = 4096
"""Pairs up to which one kernel sorts them, by counting the smaller ones of each."""

CHUNK = 256
"""Pairs of one program of the sort of many."""

CHUNKS_AT_ONCE = (64, 512)
"""Chunks whose counts are added up in one step."""

HOPPER_MEMORY, HIP_MEMORY = 232448, 65536
"""Bytes of shared memory of one program: compute capability 9, which is compiled for without a GPU; CDNA 3."""

FLOAT_PARTS = 1 << 22
"""Values up to which the rows that are still to be summed are float32: there the weights' bytes hide them."""


def supports_moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> Verdict:  # fmt: skip
    padded = triton.next_power_of_2(n_group) * triton.next_power_of_2(logits.shape[1] // n_group)
    if padded > LARGEST_ROUTER:
        return no(f"{logits.shape[1]} experts in {n_group} groups take {padded} places; at most {LARGEST_ROUTER}")
    return YES


def moe_routing(
    logits: Tensor, top_k: int, scoring: str, renormalize: bool, bias: Tensor | None, n_group: int, topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, ids
    size = experts // n_group
    rows = 1 if tokens <= ONE_A_PROGRAM else 4
    _route[(triton.cdiv(tokens, rows),)](
        logits, weights if bias is None else bias, weights, ids, tokens, logits.stride(0), logits.stride(1),
        0 if bias is None else bias.stride(0), scaling,
        TOP_K=top_k, SOFTMAX=scoring == "softmax", RENORMALIZE=renormalize, BIAS=bias is not None,
        GROUPS=n_group, KEPT=topk_group, SIZE=size, ROWS=rows, GROUPS2=triton.next_power_of_2(n_group),
        SIZE2=triton.next_power_of_2(size), TOP_K2=triton.next_power_of_2(top_k), num_warps=rows,
    )  # fmt: skip
    return weights, ids


@jit(do_not_specialize=["tokens"])
def _route(
    logits, bias, weights, ids, tokens, logits_row, logits_column, bias_stride, scaling,
    TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, GROUPS2: tl.constexpr, SIZE2: tl.constexpr,
    TOP_K2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, GROUPS2 * SIZE2)
    group, member = place // SIZE2, place % SIZE2
    expert = group * SIZE + member
    real = (group < GROUPS) & (member < SIZE)
    inside = (row < tokens)[:, None] & real[None, :]
    source = logits + row.to(tl.int64)[:, None] * logits_row + expert[None, :] * logits_column
    x = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        top = tl.max(x, axis=1)
        top = tl.where(top == float("-inf"), 0.0, top)
        score = tl.exp(x - top[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    else:
        score = 1.0 / (1.0 + tl.exp(-x))
    score = tl.where(score == score, score, 0.0)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert * bias_stride, mask=real, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(real[None, :], choice, float("-inf"))
    if GROUPS > 1:
        by_group = tl.reshape(choice, (ROWS, GROUPS2, SIZE2))
        best = tl.max(by_group, axis=2)
        if BIAS:
            first = tl.argmax(by_group, axis=2)
            others = tl.where(tl.arange(0, SIZE2)[None, None, :] == first[:, :, None], float("-inf"), by_group)
            best += tl.max(others, axis=2)
        number = tl.arange(0, GROUPS2)
        best = tl.where((number < GROUPS)[None, :], best, float("-inf"))
        ahead = (best[:, None, :] > best[:, :, None]) | (
            (best[:, None, :] == best[:, :, None]) & (number[None, None, :] < number[None, :, None])
        )
        kept = tl.sum(ahead.to(tl.int32), axis=2) < KEPT
        choice = tl.reshape(tl.where(kept[:, :, None], by_group, float("-inf")), (ROWS, GROUPS2 * SIZE2))
    slot = tl.arange(0, TOP_K2)
    found_weight = tl.zeros((ROWS, TOP_K2), dtype=tl.float32)
    found_expert = tl.zeros((ROWS, TOP_K2), dtype=tl.int32)
    for j in tl.static_range(TOP_K):
        where = tl.argmax(choice, axis=1)
        hit = place[None, :] == where[:, None]
        weight = tl.sum(tl.where(hit, score, 0.0), axis=1)
        chosen = where // SIZE2 * SIZE + where % SIZE2
        found_weight = tl.where(slot[None, :] == j, weight[:, None], found_weight)
        found_expert = tl.where(slot[None, :] == j, chosen[:, None], found_expert)
        choice = tl.where(hit, float("-inf"), choice)
    if RENORMALIZE:
        found_weight = found_weight / (tl.sum(found_weight, axis=1) + 1e-20)[:, None]
    target = row.to(tl.int64)[:, None] * TOP_K + slot[None, :]
    written = (row < tokens)[:, None] & (slot < TOP_K)[None, :]
    tl.store(weights + target, found_weight * scaling, mask=written)
    tl.store(ids + target, found_expert, mask=written)


# Experts

# A kernel compiled for one batch serves every other: nothing is assumed of these.
COUNTS = ["tokens", "pairs", "routed_blocks", "blocks", "ids_row"]


def supports_fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Verdict:  # fmt: skip
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return no(f"x is {x.dtype}; bfloat16, float16 and float32 are served")
    for name, weight in (("w13", w13), ("w2", w2), ("shared_w13", shared_w13), ("shared_w2", shared_w2)):
        if weight is not None and weight.dtype != x.dtype:
            return no(f"{name} is {weight.dtype}, x {x.dtype}; they must have one dtype")
    if w13.shape[0] > 1024:
        return no(f"{w13.shape[0]} experts; at most 1024 are sorted")
    return YES


def fused_moe(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    shape = Shape(w13.shape[0], w2.shape[2], x.shape[1], topk_ids.shape[1], x.dtype)
    gpu, shared_memory = _gpu(x.device)
    hip = launch.backend() == "hip"
    config = config_for(shape, x.shape[0], gpu, hip=hip, shared_memory=HIP_MEMORY if hip else shared_memory)
    return run(x, w13, w2, topk_weights, topk_ids, expert_map, shared_w13, shared_w2, shared_gate, config)


@functools.cache
def _gpu(device: torch.device) -> tuple[str, int]:
    """The device's name, and the bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return "", HOPPER_MEMORY
    found = torch.cuda.get_device_properties(device)
    return found.name, getattr(found, "shared_memory_per_block_optin", HOPPER_MEMORY)


def run(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    shared_w13: Tensor | None, shared_w2: Tensor | None, shared_gate: Tensor | None, config: Config,
) -> Tensor:  # fmt: skip
    """`fused_moe` with a given configuration."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    plan = planned(x, w13, w2, topk_ids, expert_map, shared_w2, config)
    between = gate_up(plan, x, w13, shared_w13, config)
    parts = down(plan, between, w2, shared_w2, topk_weights, config)
    return summed(plan, parts, x, shared_gate, out)


class Plan(NamedTuple):
    """The row blocks of one call, as the products' kernels take them."""

    ids: tuple[Tensor, int, int, Tensor]
    where: tuple[Any, ...]
    options: dict[str, Any]
    early: dict[str, bool]
    tokens: int
    pairs: int
    rows: int
    blocks: int
    shared: int


def planned(
    x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, expert_map: Tensor | None, shared_w2: Tensor | None,
    config: Config,
) -> Plan:  # fmt: skip
    """Sort the pairs by expert; unsorted, every program of the first product finds its own, and notes them down."""
    tokens, experts, top_k = x.shape[0], w13.shape[0], topk_ids.shape[1]
    pairs = tokens * top_k
    shared = 0 if shared_w2 is None else shared_w2.shape[1] // w2.shape[2]
    early = _early(config)
    sort = {"TOP_K": top_k, "MAPPED": expert_map is not None, "BLOCK_M": config.rows}
    map_of = topk_ids if expert_map is None else expert_map.contiguous()
    ids = (topk_ids, topk_ids.stride(0), topk_ids.stride(1), map_of)
    if config.tables or pairs > MOST_UNSORTED:
        routed = (pairs + min(experts, pairs) * (config.rows - 1)) // config.rows
        order, table = _sorted(ids, pairs, experts, routed, sort, early["EARLY"], x.device)
        unsorted = 0
    else:
        routed, unsorted = pairs, max(64, triton.next_power_of_2(pairs))
        order = torch.empty(pairs * config.rows, dtype=torch.int32, device=x.device)
        table = torch.empty((3, pairs), dtype=torch.int32, device=x.device)
    blocks = routed + shared * triton.cdiv(tokens, config.rows)
    options = sort | early
    options |= {"PAIRS": unsorted, "SHARED": shared, "PRECISION": "ieee" if x.dtype == torch.float32 else None}
    where = (*ids, order, table, tokens, pairs, experts, routed, blocks)
    return Plan(ids, where, options, early, tokens, pairs, pairs + shared * tokens, blocks, shared)


def gate_up(plan: Plan, x: Tensor, w13: Tensor, shared_w13: Tensor | None, config: Config) -> Tensor:
    """silu(gate) * up of every row."""
    width, hidden = w13.shape[1] // 2, x.shape[1]
    out = torch.empty((plan.rows, width), dtype=x.dtype, device=x.device)
    extra = w13[0] if shared_w13 is None else shared_w13
    _gate_up[(plan.blocks * triton.cdiv(width, config.first.n),)](
        *plan.where, x, x.stride(0), x.stride(1), w13, w13.stride(0), w13.stride(1), w13.stride(2),
        extra, extra.stride(0), extra.stride(1), out, width, hidden,
        **plan.options, ALIGNED=plan.shared > 0 and _aligned(width, w13, extra),
        **_launch(plan, config.first, width, hidden),
    )  # fmt: skip
    return out


def down(
    plan: Plan, between: Tensor, w2: Tensor, shared_w2: Tensor | None, topk_weights: Tensor, config: Config
) -> Tensor:
    """The second product of every row, times its routing weight."""
    hidden, width = w2.shape[1:]
    kept = torch.float32 if plan.rows * hidden <= FLOAT_PARTS else between.dtype
    out = torch.empty((plan.rows, hidden), dtype=kept, device=between.device)
    extra = w2[0] if shared_w2 is None else shared_w2
    wide = config.second.wide if hidden % (config.second.n * config.second.wide) == 0 else 1
    _down[(plan.blocks * triton.cdiv(hidden, config.second.n * wide),)](
        *plan.where, between, w2, w2.stride(0), w2.stride(1), w2.stride(2), extra, extra.stride(0), extra.stride(1),
        topk_weights, topk_weights.stride(0), topk_weights.stride(1), out, hidden, width,
        **(plan.options | {"PAIRS": 0}), ALIGNED=plan.shared > 0 and _aligned(width, w2, extra),
        WIDE=wide, STEPS=triton.cdiv(width, config.second.k),
        **_launch(plan, config.second, hidden, width),
    )  # fmt: skip
    return out


def summed(plan: Plan, parts: Tensor, x: Tensor, shared_gate: Tensor | None, out: Tensor) -> Tensor:
    """Add up each token's rows into `out`."""
    hidden = x.shape[1]
    columns = min(1024, triton.next_power_of_2(hidden))
    gate = x[0] if shared_gate is None else shared_gate
    _sum[(plan.tokens, triton.cdiv(hidden, columns))](
        *plan.ids, parts, x, x.stride(0), x.stride(1), gate, gate.stride(0), out, plan.tokens, plan.pairs, hidden,
        TOP_K=plan.options["TOP_K"], MAPPED=plan.options["MAPPED"], SHARED=plan.shared, GATED=shared_gate is not None,
        COLUMNS=columns, **plan.early, num_warps=4,
    )  # fmt: skip
    return out


def _aligned(width: int, *weights: Tensor) -> bool:
    """Whether every row of the weights begins at a multiple of 16 bytes, and `width` columns further too."""
    return all(
        weight.stride(-1) == 1
        and width * weight.element_size() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and all(stride * weight.element_size() % 16 == 0 for stride in weight.stride()[:-1])
        for weight in weights
    )


def _early(config: Config) -> dict[str, bool]:
    return {"EARLY": True, "launch_pdl": True} if config.early and launch.starts_early() else {"EARLY": False}


def _launch(plan: Plan, tile: Tile, n: int, k: int) -> dict[str, Any]:
    return {
        "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": tile.group, "SWAP": tile.swap, "EVEN_N": n % tile.n == 0,
        "EVEN_K": k % tile.k == 0, "HALVE": tile.halve and not plan.options["PAIRS"],
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _sorted(
    ids: tuple[Tensor, int, int, Tensor], pairs: int, experts: int, blocks: int, sort: dict[str, Any],
    early: bool, device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The pairs in the order of their experts, and of each row block its expert (or -1), first place and rows."""
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    table = torch.empty((3, blocks), dtype=torch.int32, device=device)
    bins = triton.next_power_of_2(experts)
    if pairs <= COUNTED:
        chunk = 16 if pairs <= 1024 else 32
        programs = triton.cdiv(max(pairs, blocks), chunk)
        tile = min(512, triton.next_power_of_2(pairs))
        _sort_few[(programs,)](
            *ids, order, table, pairs, blocks, **sort, BINS=bins, CHUNK=chunk, TILE=tile, EARLY=early, num_warps=4
        )
        return order, table
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty((chunks + 1, bins), dtype=torch.int32, device=device)
    _count[(chunks,)](*ids, counts, pairs, **_without(sort), BINS=bins, CHUNK=CHUNK, num_warps=4)
    step = next((size for size in CHUNKS_AT_ONCE if chunks <= size), CHUNKS_AT_ONCE[-1])
    _prefix[(triton.cdiv(bins, 16),)](counts, chunks, BINS=bins, COLUMNS=16, STEP=step, num_warps=8)
    part = triton.next_power_of_2(triton.cdiv(blocks, chunks))
    _sort_many[(chunks,)](
        *ids, counts, order, table, pairs, blocks, chunks,
        **sort, BINS=bins, CHUNK=CHUNK, PART=part, TILE=32, num_warps=8,
    )  # fmt: skip
    return order, table


def _without(sort: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sort.items() if name != "BLOCK_M"}


@jit
def _expert_of(pair, inside, ids, ids_row, ids_column, expert_map, TOP_K: tl.constexpr, MAPPED: tl.constexpr):
    """The local expert of each pair, -1 for padding and for other ranks' experts."""
    place = (pair // TOP_K).to(tl.int64) * ids_row + (pair % TOP_K) * ids_column
    expert = tl.load(ids + place, mask=inside, other=-1).to(tl.int32)
    if MAPPED:
        expert = tl.load(expert_map + expert, mask=expert >= 0, other=-1).to(tl.int32)
    return expert


@jit
def _fill_table(block, written, counts, table, blocks, BLOCK_M: tl.constexpr, BINS: tl.constexpr):
    """Write expert, first place and rows of the row blocks `block`, from the number of rows of every expert."""
    blocks_of = (counts + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(blocks_of, axis=0)
    start = tl.cumsum(counts, axis=0) - counts
    expert = tl.sum((last[None, :] <= block[:, None]).to(tl.int32), axis=1)
    own = tl.arange(0, BINS)[None, :] == expert[:, None]
    nth = block - tl.sum(tl.where(own, (last - blocks_of)[None, :], 0), axis=1)
    rows = tl.sum(tl.where(own, counts[None, :], 0), axis=1) - nth * BLOCK_M
    first = tl.sum(tl.where(own, start[None, :], 0), axis=1) + nth * BLOCK_M
    tl.store(table + block, tl.where(expert < BINS, expert, -1), mask=written)
    tl.store(table + blocks + block, first, mask=written)
    tl.store(table + 2 * blocks + block, tl.minimum(rows, BLOCK_M), mask=written)


@jit(do_not_specialize=["pairs", "blocks", "ids_row"])
def _sort_few(
    ids, ids_row, ids_column, expert_map, order, table, pairs, blocks,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Every program looks at all pairs, and places CHUNK of them and fills in CHUNK row blocks."""
    if EARLY:
        gdc_launch_dependents()
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    own = _expert_of(pair, pair < pairs, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
    place = tl.zeros((CHUNK,), dtype=tl.int32)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for begin in range(0, pairs, TILE):
        other = begin + tl.arange(0, TILE)
        expert = _expert_of(other, other < pairs, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
        real = expert >= 0
        counts += tl.histogram(tl.where(real, expert, 0), BINS, mask=real)
        same = (expert[None, :] == own[:, None]) & (other[None, :] < pair[:, None])
        ahead = real[None, :] & ((expert[None, :] < own[:, None]) | same)
        place += tl.sum(ahead.to(tl.int32), axis=1)
    tl.store(order + place, pair, mask=own >= 0)
    _fill_table(pair, pair < blocks, counts, table, blocks, BLOCK_M, BINS)


@jit(do_not_specialize=["pairs", "ids_row"])
def _count(
    ids, ids_row, ids_column, expert_map, counts, pairs, TOP_K: tl.constexpr, MAPPED: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """How many pairs of each expert a chunk has."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _expert_of(pair, pair < pairs, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
    found = tl.histogram(tl.where(expert >= 0, expert, 0), BINS, mask=expert >= 0)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@jit(do_not_specialize=["chunks"])
def _prefix(counts, chunks, BINS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Counts of the chunks before each chunk, in place; the totals in the row behind the last."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for begin in range(0, chunks, STEP):
        chunk = begin + tl.arange(0, STEP)
        place = counts + chunk[:, None] * BINS + column[None, :]
        inside = (chunk < chunks)[:, None] & (column < BINS)[None, :]
        found = tl.load(place, mask=inside, other=0)
        tl.store(place, total[None, :] + tl.cumsum(found, axis=0) - found, mask=inside)
        total += tl.sum(found, axis=0)
    tl.store(counts + chunks * BINS + column, total, mask=column < BINS)


@jit(do_not_specialize=["pairs", "blocks", "chunks", "ids_row"])
def _sort_many(
    ids, ids_row, ids_column, expert_map, counts, order, table, pairs, blocks, chunks,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Place the pairs of a chunk, and fill in PART row blocks."""
    chunk = tl.program_id(0)
    inner = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + inner
    expert = _expert_of(pair, pair < pairs, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
    totals = tl.load(counts + chunks * BINS + tl.arange(0, BINS))
    start = tl.cumsum(totals, axis=0) - totals
    real = expert >= 0
    place = tl.gather(start, tl.maximum(expert, 0), 0)
    place += tl.load(counts + chunk * BINS + expert, mask=real, other=0)
    for begin in range(0, CHUNK, TILE):
        other = begin + tl.arange(0, TILE)
        ahead = chunk * CHUNK + other
        earlier = _expert_of(ahead, ahead < pairs, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
        same = (earlier[None, :] == expert[:, None]) & (other[None, :] < inner[:, None])
        place += tl.sum(same.to(tl.int32), axis=1)
    tl.store(order + place, pair, mask=real)
    block = chunk * PART + tl.arange(0, PART)
    _fill_table(block, block < blocks, totals, table, blocks, BLOCK_M, BINS)


@jit
def _rows_of(
    block, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Expert (-1: none) of one row block, and of its first ROWS rows their numbers, tokens and which are real.

    Rows are pairs; behind them a shared expert's: `tokens` rows for each slice that is as wide as an expert.
    """
    inner = tl.arange(0, ROWS)
    routed = block
    if SHARED > 0:
        parts = (tokens + BLOCK_M - 1) // BLOCK_M
        routed = block - SHARED * parts
    if PAIRS > 0:
        other = tl.arange(0, PAIRS)
        all_experts = _expert_of(other, other < pairs, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
        expert = _expert_of(routed, routed >= 0, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
        same = (all_experts == expert) & (other < pairs)
        before = tl.sum((same & (other < routed)).to(tl.int32), axis=0)
        nth = tl.cumsum(same.to(tl.int32), axis=0) - 1 - before
        hit = same[None, :] & (nth[None, :] == inner[:, None])
        behind = tl.sum(tl.where(hit, other[None, :] + 1, 0), axis=1)
        real = behind > 0
        row = tl.maximum(behind - 1, 0)
        expert = tl.where(before % BLOCK_M == 0, expert, -1)
    else:
        expert = tl.load(table + routed, mask=routed >= 0, other=-1)
        first = tl.load(table + routed_blocks + routed, mask=expert >= 0, other=0)
        count = tl.load(table + 2 * routed_blocks + routed, mask=expert >= 0, other=0)
        real = inner < count
        row = tl.load(order + first + inner, mask=real, other=0)
    token = row // TOP_K
    if SHARED > 0:  # noqa: SIM102 - one is decided by the compiler
        if routed < 0:
            expert = experts + block // parts
            token = (block % parts) * BLOCK_M + inner
            real = token < tokens
            token = tl.where(real, token, 0)
            row = pairs + (block // parts) * tokens + token
    return expert, row, token, real


@jit
def _half_full(block, table, tokens, routed_blocks, BLOCK_M: tl.constexpr, SHARED: tl.constexpr):
    """Whether a row block of the table has no more than half of its rows."""
    routed = block
    if SHARED > 0:
        parts = (tokens + BLOCK_M - 1) // BLOCK_M
        routed = block - SHARED * parts
    count = tl.load(table + 2 * routed_blocks + routed, mask=routed >= 0, other=0)
    if SHARED > 0:  # noqa: SIM102 - one is decided by the compiler
        if routed < 0:
            count = tokens - (block % parts) * BLOCK_M
    return count <= BLOCK_M // 2


@jit
def _place(blocks, columns, GROUP: tl.constexpr):
    """Row block and column block of this program."""
    number = tl.program_id(0)
    if GROUP == 1:
        return number // columns, number % columns
    first = number // (GROUP * columns) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    inner = number % (GROUP * columns)
    return first + inner % size, inner // size


@jit
def _either(first, a, b, ALIGNED: tl.constexpr):
    """One of two pointers, by way of integers: AMD's compiler cannot choose between pointers into two tensors."""
    chosen = tl.where(first, a.to(tl.int64), b.to(tl.int64)).to(a.dtype)
    if ALIGNED:
        chosen = tl.multiple_of(chosen, 16)
    return chosen


@jit(do_not_specialize=COUNTS)
def _gate_up(
    ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks, blocks,
    x, x_row, x_column, w13, w13_expert, w13_row, w13_column, shared, shared_row, shared_column, out, width, hidden,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr, PAIRS: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ALIGNED: tl.constexpr, HALVE: tl.constexpr,
):  # fmt: skip
    """out[row] = silu(x[token] @ gate.T) * (x[token] @ up.T), for BLOCK_M rows and BLOCK_N columns."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    block, column = _place(blocks, (width + BLOCK_N - 1) // BLOCK_N, GROUP)
    few = False
    if HALVE:
        few = _half_full(block, table, tokens, routed_blocks, BLOCK_M, SHARED)
    if few:
        _gate_up_rows(
            block, column, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
            x, x_row, x_column, w13, w13_expert, w13_row, w13_column, shared, shared_row, shared_column, out,
            width, hidden, TOP_K, MAPPED, BLOCK_M, PAIRS, SHARED, PRECISION, BLOCK_N, BLOCK_K, SWAP, EVEN_N, EVEN_K,
            ALIGNED, BLOCK_M // 2,
        )  # fmt: skip
    else:
        _gate_up_rows(
            block, column, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
            x, x_row, x_column, w13, w13_expert, w13_row, w13_column, shared, shared_row, shared_column, out,
            width, hidden, TOP_K, MAPPED, BLOCK_M, PAIRS, SHARED, PRECISION, BLOCK_N, BLOCK_K, SWAP, EVEN_N, EVEN_K,
            ALIGNED, BLOCK_M,
        )  # fmt: skip


@jit
def _gate_up_rows(
    block, column, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
    x, x_row, x_column, w13, w13_expert, w13_row, w13_column, shared, shared_row, shared_column, out, width, hidden,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first ROWS rows of a row block."""
    expert, row, token, real = _rows_of(
        block, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
        TOP_K, MAPPED, BLOCK_M, PAIRS, SHARED, ROWS,
    )  # fmt: skip
    if PAIRS > 0:  # what was found out here spares the second product the search
        routed = block
        if SHARED > 0:
            routed = block - SHARED * ((tokens + BLOCK_M - 1) // BLOCK_M)
        tells = (column == 0) & (routed >= 0)
        inner = tl.arange(0, ROWS)
        tl.store(table + routed, expert, mask=tells)
        tl.store(table + routed_blocks + routed, routed * BLOCK_M, mask=tells)
        tl.store(table + 2 * routed_blocks + routed, tl.sum(real.to(tl.int32), axis=0), mask=tells)
        tl.store(order + routed * BLOCK_M + inner, row, mask=tells & real)
    if expert >= 0:
        base = w13 + expert.to(tl.int64) * w13_expert
        row_step, column_step, up = w13_row, w13_column, width
        if SHARED > 0:
            extra = expert >= experts
            base = _either(extra, shared + (expert - experts).to(tl.int64) * width * shared_row, base, ALIGNED)
            row_step = tl.where(extra, shared_row, w13_row)
            column_step = tl.where(extra, shared_column, w13_column)
            up = tl.where(extra, width * SHARED, width)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        source = n if EVEN_N else tl.minimum(n, width - 1)
        k = tl.arange(0, BLOCK_K)
        a_at = x + token.to(tl.int64)[:, None] * x_row + k[None, :] * x_column
        gate_at = base + source.to(tl.int64)[:, None] * row_step + k[None, :] * column_step
        up_offset = tl.cast(up, tl.int64) * row_step
        gate = tl.zeros((BLOCK_N if SWAP else ROWS, ROWS if SWAP else BLOCK_N), dtype=tl.float32)
        more = tl.zeros((BLOCK_N if SWAP else ROWS, ROWS if SWAP else BLOCK_N), dtype=tl.float32)
        for begin in range(0, hidden, BLOCK_K):
            if EVEN_K:  # the weights first: the rows' addresses come from a second look-up
                g = tl.load(gate_at)
                u = tl.load(gate_at + up_offset)
                a = tl.load(a_at, mask=real[:, None], other=0.0)
            else:
                deep = (begin + k < hidden)[None, :]
                g = tl.load(gate_at, mask=deep, other=0.0)
                u = tl.load(gate_at + up_offset, mask=deep, other=0.0)
                a = tl.load(a_at, mask=real[:, None] & deep, other=0.0)
            if SWAP:
                gate = tl.dot(g, tl.trans(a), gate, input_precision=PRECISION)
                more = tl.dot(u, tl.trans(a), more, input_precision=PRECISION)
            else:
                gate = tl.dot(a, tl.trans(g), gate, input_precision=PRECISION)
                more = tl.dot(a, tl.trans(u), more, input_precision=PRECISION)
            a_at += BLOCK_K * x_column
            gate_at += BLOCK_K * column_step
        result = gate / (1.0 + tl.exp(-gate)) * more
        if SWAP:
            result = tl.trans(result)
        target = out + row.to(tl.int64)[:, None] * width + n[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=real[:, None] & (n < width)[None, :])


@jit(do_not_specialize=COUNTS)
def _down(
    ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks, blocks,
    x, w2, w2_expert, w2_row, w2_column, shared, shared_row, shared_column, weights, weights_row, weights_column, out,
    hidden, width,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr, PAIRS: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ALIGNED: tl.constexpr, HALVE: tl.constexpr,
    WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """out[row] = (x[row] @ w2[expert].T) * routing weight, for BLOCK_M rows and WIDE times BLOCK_N columns."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    block, column = _place(blocks, (hidden + BLOCK_N * WIDE - 1) // (BLOCK_N * WIDE), GROUP)
    few = False
    if HALVE:
        few = _half_full(block, table, tokens, routed_blocks, BLOCK_M, SHARED)
    if few:
        _down_rows(
            block, column, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
            x, w2, w2_expert, w2_row, w2_column, shared, shared_row, shared_column, weights, weights_row,
            weights_column, out, hidden, width, TOP_K, MAPPED, BLOCK_M, PAIRS, SHARED, PRECISION, BLOCK_N, BLOCK_K,
            SWAP, EVEN_N, EVEN_K, ALIGNED, BLOCK_M // 2, WIDE, STEPS,
        )  # fmt: skip
    else:
        _down_rows(
            block, column, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
            x, w2, w2_expert, w2_row, w2_column, shared, shared_row, shared_column, weights, weights_row,
            weights_column, out, hidden, width, TOP_K, MAPPED, BLOCK_M, PAIRS, SHARED, PRECISION, BLOCK_N, BLOCK_K,
            SWAP, EVEN_N, EVEN_K, ALIGNED, BLOCK_M, WIDE, STEPS,
        )  # fmt: skip


@jit
def _down_rows(
    block, column, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
    x, w2, w2_expert, w2_row, w2_column, shared, shared_row, shared_column, weights, weights_row, weights_column, out,
    hidden, width,
    TOP_K: tl.constexpr, MAPPED: tl.constexpr, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The first ROWS rows of a row block.

    The columns of all WIDE blocks are one loop, so that loads go on while a block's result is stored.
    """
    expert, row, token, real = _rows_of(
        block, ids, ids_row, ids_column, expert_map, order, table, tokens, pairs, experts, routed_blocks,
        TOP_K, MAPPED, BLOCK_M, PAIRS, SHARED, ROWS,
    )  # fmt: skip
    if expert >= 0:
        base = w2 + expert.to(tl.int64) * w2_expert
        row_step, column_step = w2_row, w2_column
        if SHARED > 0:
            extra = expert >= experts
            base = _either(extra, shared + (expert - experts).to(tl.int64) * width * shared_column, base, ALIGNED)
            row_step = tl.where(extra, shared_row, w2_row)
            column_step = tl.where(extra, shared_column, w2_column)
        n = column * (BLOCK_N * WIDE) + tl.arange(0, BLOCK_N)
        source = n if EVEN_N else tl.minimum(n, hidden - 1)
        k = tl.arange(0, BLOCK_K)
        a_at = x + row.to(tl.int64)[:, None] * width + k[None, :]
        b_at = base + source.to(tl.int64)[:, None] * row_step + k[None, :] * column_step
        routed = real & (row < pairs)
        weight_at = weights + token.to(tl.int64) * weights_row + (row % TOP_K) * weights_column
        weight = tl.load(weight_at, mask=routed, other=1.0).to(tl.float32)
        target = out + row.to(tl.int64)[:, None] * hidden + n[None, :]
        total = tl.zeros((BLOCK_N if SWAP else ROWS, ROWS if SWAP else BLOCK_N), dtype=tl.float32)
        for i in range(0, WIDE * STEPS):
            step = i % STEPS
            b_place = b_at + (i // STEPS * BLOCK_N * row_step + step * BLOCK_K * column_step)
            if EVEN_K:  # the weights first: the rows' addresses come from a second look-up
                b = tl.load(b_place)
                a = tl.load(a_at + step * BLOCK_K, mask=real[:, None], other=0.0)
            else:
                deep = (step * BLOCK_K + k < width)[None, :]
                b = tl.load(b_place, mask=deep, other=0.0)
                a = tl.load(a_at + step * BLOCK_K, mask=real[:, None] & deep, other=0.0)
            if SWAP:
                total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
            else:
                total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
            if WIDE > 1:  # noqa: SIM102 - one is decided by the compiler
                if step == STEPS - 1:
                    _store_rows(target + i // STEPS * BLOCK_N, total, weight, real, n < hidden, SWAP)
                    total = tl.zeros_like(total)
        if WIDE == 1:
            _store_rows(target, total, weight, real, n < hidden, SWAP)


@jit
def _store_rows(target, total, weight, real, inside, SWAP: tl.constexpr):
    result = tl.trans(total) if SWAP else total
    tl.store(target, (result * weight[:, None]).to(target.dtype.element_ty), mask=real[:, None] & inside[None, :])


@jit(do_not_specialize=["tokens", "pairs", "ids_row"])
def _sum(
    ids, ids_row, ids_column, expert_map, parts, x, x_row, x_column, shared_gate, gate_stride, out,
    tokens, pairs, hidden, TOP_K: tl.constexpr, MAPPED: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum of its pairs' rows, in their order, and of its gated shared rows."""
    if EARLY:
        gdc_wait()
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = _expert_of(pair, True, ids, ids_row, ids_column, expert_map, TOP_K, MAPPED)
        part = tl.load(parts + pair.to(tl.int64) * hidden + column, mask=inside, other=0.0)
        total += tl.where(expert >= 0, part.to(tl.float32), 0.0)  # the load does not wait for the look-up
    if SHARED > 0:
        extra = tl.zeros((COLUMNS,), dtype=tl.float32)
        for j in tl.static_range(SHARED):
            at = parts + (pairs + j * tokens + token).to(tl.int64) * hidden + column
            extra += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            product = tl.zeros((COLUMNS,), dtype=tl.float32)
            for begin in range(0, hidden, COLUMNS):
                k = begin + tl.arange(0, COLUMNS)
                value = tl.load(x + token.to(tl.int64) * x_row + k * x_column, mask=k < hidden, other=0.0)
                factor = tl.load(shared_gate + k * gate_stride, mask=k < hidden, other=0.0)
                product += value.to(tl.float32) * factor.to(tl.float32)
            extra = extra / (1.0 + tl.exp(-tl.sum(product, axis=0)))
        total += extra
    tl.store(out + token.to(tl.int64) * hidden + column, total.to(out.dtype.element_ty), mask=inside)
