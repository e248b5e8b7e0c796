"""The sparse indexer: its formulas by hand, its cache byte for byte, and every provider against the reference."""

from __future__ import annotations

import math
import struct
from typing import Any

import e4m3_by_hand as e4m3
import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.mla_attention import mla_cache_write, sparse_mla_attention
from atom_patches.kernels.mla_attention import reference as attention
from atom_patches.kernels.sparse_indexer import (
    INDEXER_CACHE_GATHER,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_PAGED,
    INDEXER_QUERIES,
    LOCAL_TO_PAGED,
    ONE_STEP,
    OPERATIONS,
    TOPK_INDICES,
    bench,
    indexer_cache_gather,
    indexer_cache_write,
    indexer_logits,
    indexer_logits_paged,
    indexer_queries,
    local_to_paged,
    reference,
    topk_indices,
)

GENERAL = [name for name in harness.providers(TOPK_INDICES) if name == "triton"]
SELECTING = harness.providers(TOPK_INDICES)
FP8 = torch.float8_e4m3fn
#: Sums of exact products; the interpreter and the reference differ in their order only.
SUMS = (1e-3, 2e-2) if harness.GPU else (1e-5, 1e-5)
EXACT = (0.0, 0.0)
UNMAPPED = 2**30


def on_device(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(harness.DEVICE)


def poisoned_cache(blocks: int, page: int, size: int, spread: int = 1) -> Tensor:
    """NaN in every value and scale; `spread` > 1: its blocks are every spread-th of a larger one."""
    cache = torch.full((blocks * spread, page, size + 4), 0xFF, dtype=torch.uint8)
    return cache.to(harness.DEVICE)[::spread]


class Requests:
    """Keys of requests in a scrambled cache; whatever belongs to none is NaN, whatever maps nothing is out of range."""

    def __init__(self, lengths: list[int], size: int = 32, page: int = 4, seed: int = 0, spread: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.size, self.page = lengths, size, page
        pages = [-(-length // page) for length in lengths]
        blocks = sum(pages) + 2
        order = torch.randperm(blocks, generator=generator).tolist()
        table = torch.full((len(lengths), max([1, *pages]) + 1), UNMAPPED, dtype=torch.int32)
        for i, count in enumerate(pages):
            for j in range(count):
                table[i, j] = order.pop()
        self.slots = [[int(table[i, p // page]) * page + p % page for p in range(n)] for i, n in enumerate(lengths)]
        self.table = table.to(harness.DEVICE)
        self.cache = poisoned_cache(blocks, page, size, spread)
        every = [slot for own in self.slots for slot in own]
        keys = torch.randn(len(every), size, generator=generator).to(harness.DEVICE)
        reference.indexer_cache_write(keys, on_device(every, torch.int64), self.cache, False)
        self.starts = on_device([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def queries(count: int, heads: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(count, heads, size, generator=generator).to(FP8).to(harness.DEVICE)
    return q, torch.randn(count, heads, generator=generator).to(harness.DEVICE)


def check(
    provider: str, operation: registry.Operation, arguments: tuple[Any, ...], tolerance: tuple[float, float]
) -> None:
    verdict = registry.supports(operation, provider, arguments)
    if not verdict.ok and provider != "triton":
        pytest.skip(verdict.reason)
    harness.check(operation, provider, arguments, tolerance=tolerance)


# The queries


def queries_to_turn(rows: int, heads: int, size: int, half: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Parts of larger tensors; rows of many magnitudes, a head of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows + 1, heads, size + 16, generator=generator)
    wide *= torch.randn(rows + 1, heads, 1, generator=generator).mul(2).exp()
    wide[-1, -1] = 0.0
    angles = torch.randn(rows + 1, half, generator=generator) * 9
    gates = torch.randn(heads, rows + 1, generator=generator).mT
    parts = wide.to(dtype), gates, angles.cos(), angles.sin()
    q, *rest = (x.to(harness.DEVICE)[1:] for x in parts)
    return q[:, :, 16:], *rest


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_turned_mixed_and_scaled(interleaved: bool) -> None:
    """By complex numbers, by the transform's definition, and by hand."""
    size, half = 16, 3
    q, gates, cos, sin = (x.cpu() for x in queries_to_turn(3, 2, size, half, torch.float32, seed=5))
    fp8, weights = reference.indexer_queries(q, gates, cos, sin, interleaved)
    for t in range(3):
        for h in range(2):
            row = q[t, h].double().tolist()
            for i in range(half):
                at = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                z = complex(row[at[0]], row[at[1]]) * complex(float(cos[t, i]), float(sin[t, i]))
                row[at[0]], row[at[1]] = z.real, z.imag
            mixed = [sum(x * (-1) ** (i & j).bit_count() for i, x in enumerate(row)) / size**0.5 for j in range(size)]
            mantissa, exponent = math.frexp(max(1e-4, *(abs(x) for x in mixed)) / 448)
            scale = 2.0 ** (exponent - (mantissa == 0.5))
            assert float(weights[t, h]) == pytest.approx(float(gates[t, h]) * scale * (2 * size) ** -0.5, rel=1e-6)
            for got, want in zip(fp8[t, h].float().tolist(), mixed, strict=True):
                assert got * scale == pytest.approx(want, rel=2.0**-4, abs=scale * 2.0**-10)


def check_queries(provider: str, call: tuple[Any, ...]) -> None:
    """Within a step of E4M3, and as good as always the very same; weights are those of the scale."""
    check(provider, INDEXER_QUERIES, call, ONE_STEP)
    fp8, weights = registry.implementation(INDEXER_QUERIES, provider)(*call)
    want, wanted = reference.indexer_queries(*call)
    same = fp8.view(torch.uint8) == want.view(torch.uint8)
    assert not same.numel() or float(same.float().mean()) > 0.999
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("provider", GENERAL)
@pytest.mark.parametrize("interleaved", [False, True])
@harness.examples(6)
@given(st.data(), st.integers(0, 5), st.integers(0, 2**31))
def test_any_queries(provider: str, interleaved: bool, data: st.DataObject, rows: int, seed: int) -> None:
    heads, size = data.draw(st.sampled_from([1, 5, 20])), data.draw(st.sampled_from([16, 64]))
    half = data.draw(st.sampled_from([0, 3, size // 4, size // 2]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    check_queries(provider, (*queries_to_turn(rows, heads, size, half, dtype, seed), interleaved))


@pytest.mark.parametrize("provider", GENERAL)
@pytest.mark.parametrize("rows", [2, 40])
def test_queries_at_the_size_of_deepseek(provider: str, rows: int) -> None:
    rows = rows if harness.GPU else rows // 2
    check_queries(provider, (*queries_to_turn(rows, 64, 128, 32, torch.bfloat16, seed=rows), False))


def test_queries_that_cannot_be_mixed_or_turned() -> None:
    q, gates, cos, sin = queries_to_turn(2, 3, 48, 8, torch.float32, seed=0)
    with pytest.raises(ValueError, match="a power of two, got 48"):
        indexer_queries(q, gates, cos, sin)
    with pytest.raises(ValueError, match=r"cos and sin \[2, at most 16\]"):
        indexer_queries(q[:, :, :32], gates, cos[:1], sin[:1])
    assert indexer_queries(q[:, :, :32], gates, cos, sin)[0].shape == (2, 3, 32)


def test_mixing_leaves_products_as_they_are() -> None:
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    mixed = reference.hadamard(x)
    torch.testing.assert_close(mixed @ mixed.T, x @ x.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reference.hadamard(mixed), x, rtol=1e-5, atol=1e-5)


# The key cache


def keys_to_write(count: int, size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Keys of many magnitudes, a row of zeros, and one whose scale is a power of two already."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, size, generator=generator) * torch.randn(count, 1, generator=generator).mul(5).exp()
    keys[0] = 0.0
    keys[-1] = torch.linspace(-7.0, 7.0, size)
    return keys.clamp(-6e4, 6e4).to(harness.DEVICE, dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_bytes_of_a_block(power_of_two: bool) -> None:
    page, size = 4, 128
    keys = keys_to_write(5, size, seed=1)
    cache = poisoned_cache(2, page, size)
    indexer_cache_write(keys, on_device([6, 1, -1, 4, 3]), cache, power_of_two=power_of_two)
    values = bytearray(b"\xff" * (2 * page * size))
    scales = bytearray(b"\xff" * (2 * page * 4))
    for i, slot in ((0, 6), (1, 1), (3, 4), (4, 3)):
        row = keys[i].float().tolist()
        scale = e4m3.single(e4m3.single(max(1e-4, *(abs(x) for x in row))) / 448.0)
        if power_of_two:
            mantissa, exponent = math.frexp(scale)
            scale = 2.0 ** (exponent - (mantissa == 0.5))
        values[slot * size : slot * size + size] = e4m3.encode_all(row, scale)
        scales[slot * 4 : slot * 4 + 4] = struct.pack("<f", scale)
    for block in range(2):
        want = (
            values[block * page * size : (block + 1) * page * size] + scales[block * page * 4 : (block + 1) * page * 4]
        )
        assert bytes(cache[block].flatten().tolist()) == bytes(want), f"block {block}"


@pytest.mark.parametrize("provider", harness.providers(INDEXER_CACHE_WRITE))
@pytest.mark.parametrize("power_of_two", [False, True])
def test_write_at_the_size_of_deepseek(provider: str, power_of_two: bool) -> None:
    keys = keys_to_write(300, 128, seed=2)
    slots = torch.randperm(6 * 64, generator=torch.Generator().manual_seed(0))[:300]
    slots[[5, 298]] = -1
    arguments = keys, slots.to(harness.DEVICE), poisoned_cache(6, 64, 128), power_of_two
    check(provider, INDEXER_CACHE_WRITE, arguments, EXACT)


@pytest.mark.parametrize("provider", GENERAL)
@harness.examples(12)
@given(st.data(), st.integers(0, 9), st.booleans(), st.integers(0, 2**31))
def test_any_write(provider: str, data: st.DataObject, count: int, power_of_two: bool, seed: int) -> None:
    size, page = data.draw(st.sampled_from([4, 100])), data.draw(st.sampled_from([1, 12]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    keys = keys_to_write(count + 2, size + 3, seed, dtype)[: count + 1, 3:]
    blocks = -(-count // page) + 1
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(blocks * page, generator=generator)[: count + 1]
    slots[torch.rand(count + 1, generator=generator) < 0.3] = -1
    slots = slots.to(harness.DEVICE, data.draw(st.sampled_from([torch.int32, torch.int64])))
    cache = poisoned_cache(blocks, page, size, spread=data.draw(st.integers(1, 2)))
    check(provider, INDEXER_CACHE_WRITE, (keys[: len(slots)], slots, cache, power_of_two), EXACT)


def test_gathered_keys_are_those_that_were_written() -> None:
    batch = Requests([5, 0, 3, 9])
    key, scale = indexer_cache_gather(batch.cache, batch.table, cu_seqlens_k=batch.starts, total=17)
    raw = batch.cache.cpu()
    at = 0
    for own in batch.slots:
        for slot in own:
            block, place = raw[slot // batch.page].flatten(), slot % batch.page
            assert torch.equal(key[at].view(torch.uint8).cpu(), block[place * batch.size : (place + 1) * batch.size])
            end = batch.page * batch.size + 4 * place
            assert struct.unpack("<f", bytes(block[end : end + 4].tolist()))[0] == float(scale[at])
            at += 1
    assert at == 17


@pytest.mark.parametrize("provider", harness.providers(INDEXER_CACHE_GATHER))
@pytest.mark.parametrize("lengths", [[70, 1, 64, 0, 33], [], [0], [300], [2, 0, 1] * 60])
def test_gather(provider: str, lengths: list[int]) -> None:
    batch = Requests(lengths, size=128, page=64)
    check(provider, INDEXER_CACHE_GATHER, (batch.cache, batch.table, batch.starts, sum(lengths)), EXACT)


@pytest.mark.parametrize("provider", GENERAL)
@harness.examples(8)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=140), st.sampled_from([1, 6]), st.integers(1, 2))
def test_any_gather(provider: str, lengths: list[int], page: int, spread: int) -> None:
    batch = Requests(lengths[:5] + [min(x, 1) for x in lengths[5:]], page=page, spread=spread)
    total = sum(batch.lengths)
    table, starts = batch.table.T.contiguous().T, harness.spread(batch.starts)
    check(provider, INDEXER_CACHE_GATHER, (batch.cache, table, starts, total), EXACT)


# The logits


def score(q: Tensor, weights: Tensor, key: Tensor, scale: Tensor) -> float:
    """One query, one key, head by head in float64."""
    total = 0.0
    for head, weight in zip(q.double().cpu(), weights.tolist(), strict=True):
        total += weight * max(0.0, float(head @ key.double().cpu()))
    return total * float(scale)


def test_the_reference_is_the_formula() -> None:
    batch = Requests([6, 0, 4])
    q, weights = queries(4, 3, batch.size, seed=1)
    key, scale = indexer_cache_gather(batch.cache, batch.table, cu_seqlens_k=batch.starts, total=10)
    start, end = [0, 2, 6, 3], [4, 10, 9, 3]
    ragged = reference.indexer_logits(q, key, scale, weights, on_device(start), on_device(end)).tolist()
    owners, lengths = [0, 2, -1, 0], [6, 3, 4, 0]
    of_queries = on_device(owners), on_device(lengths)
    paged = reference.indexer_logits_paged(q, batch.cache, weights, batch.table, *of_queries, 7).tolist()
    for t in range(4):
        for s in range(10):
            inside = start[t] <= s < end[t]
            want = score(q[t], weights[t], key[s], scale[s]) if inside else math.nan
            assert ragged[t][s] == pytest.approx(want, rel=1e-5, abs=1e-6, nan_ok=True), (t, s)
        for s in range(7):
            inside = owners[t] >= 0 and s < lengths[t]
            at = (0, 6, 6)[owners[t]] + s
            want = score(q[t], weights[t], key[at], scale[at]) if inside else math.nan
            assert paged[t][s] == pytest.approx(want, rel=1e-5, abs=1e-6, nan_ok=True), (t, s)


@pytest.mark.parametrize("provider", GENERAL)
@harness.examples(8)
@given(st.data(), st.integers(0, 40), st.integers(0, 70), st.integers(0, 2**31))
def test_any_ragged_logits(provider: str, data: st.DataObject, rows: int, columns: int, seed: int) -> None:
    """Keys that no range holds, and queries without a range, are NaN."""
    heads, size = data.draw(st.sampled_from([1, 3, 40])), data.draw(st.sampled_from([4, 32]))
    generator = torch.Generator().manual_seed(seed)
    q, weights = queries(rows, heads, size, seed)
    edges = torch.randint(0, columns + 1, (rows, 2), generator=generator).sort(1).values.int()
    edges[torch.rand(rows, generator=generator) < 0.2] = 0
    column = torch.arange(columns)
    seen = ((column >= edges[:, :1]) & (column < edges[:, 1:])).any(0)
    key = torch.randn(columns, size, generator=generator).masked_fill(~seen[:, None], math.nan).to(FP8)
    scale = torch.rand(columns, generator=generator).masked_fill(~seen, math.nan)
    blind = (edges[:, 0] == edges[:, 1]).to(harness.DEVICE)
    q.view(torch.uint8)[blind] = 0x7F
    start, end = (edge.to(harness.DEVICE) for edge in edges.T)
    arguments = q, key.to(harness.DEVICE), scale.to(harness.DEVICE), weights.T.contiguous().T, start, end
    check(provider, INDEXER_LOGITS, arguments, SUMS)


@pytest.mark.parametrize("provider", GENERAL)
def test_ranges_that_begin_and_end_at_the_edges_of_tiles(provider: str) -> None:
    edges = [0, 31, 32, 33, 127, 128, 129, 160]
    for low in edges[:-1]:
        q, weights = queries(len(edges), 2, 32, seed=low)
        key = torch.randn(160, 32, generator=torch.Generator().manual_seed(low)).to(FP8).to(harness.DEVICE)
        scale = torch.ones(160, device=harness.DEVICE)
        start = on_device([low] * len(edges))
        check(provider, INDEXER_LOGITS, (q, key, scale, weights, start, on_device(edges)), SUMS)


@pytest.mark.parametrize("provider", GENERAL)
@harness.examples(5)
@given(st.data(), st.lists(st.integers(0, 90), min_size=1, max_size=4), st.integers(0, 2**31))
def test_any_paged_logits(provider: str, data: st.DataObject, lengths: list[int], seed: int) -> None:
    """As many queries a request as come, padding among them, in rows longer than any request."""
    page, heads = data.draw(st.sampled_from([1, 6, 64])), data.draw(st.sampled_from([1, 3, 32]))
    batch = Requests(lengths, page=page, seed=seed, spread=data.draw(st.integers(1, 2)))
    owners = data.draw(st.lists(st.integers(-1, len(lengths) - 1), max_size=6))
    seen = [data.draw(st.integers(0, lengths[owner])) if owner >= 0 else 5 for owner in owners]
    q, weights = queries(len(owners), heads, batch.size, seed)
    width = data.draw(st.sampled_from([max(lengths) + 1, 1500]))
    arguments = q, batch.cache, weights, batch.table, on_device(owners), on_device(seen), width
    check(provider, INDEXER_LOGITS_PAGED, arguments, SUMS)
    one_each = on_device(lengths)
    q, weights = queries(len(lengths), heads, batch.size, seed)
    check(provider, INDEXER_LOGITS_PAGED, (q, batch.cache, weights, batch.table, None, one_each, width), SUMS)


@pytest.mark.parametrize("provider", harness.providers(INDEXER_LOGITS))
def test_ragged_logits_at_the_size_of_deepseek(provider: str) -> None:
    rows, columns = (200, 1000) if harness.GPU else (5, 140)
    q, weights = queries(rows, 64, 128, seed=3)
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(columns, 128, generator=generator).to(FP8).to(harness.DEVICE)
    scale = torch.rand(columns, generator=generator).to(harness.DEVICE) / 64
    end = torch.arange(columns - rows, columns, dtype=torch.int32, device=harness.DEVICE)
    start = torch.zeros_like(end)
    start[2:] = 3
    check(provider, INDEXER_LOGITS, (q, key, scale, weights, start, end), SUMS)


@pytest.mark.parametrize("provider", harness.providers(INDEXER_LOGITS_PAGED))
def test_paged_logits_at_the_size_of_deepseek(provider: str) -> None:
    batch = Requests([1000, 64, 1, 257] if harness.GPU else [100, 1], size=128, page=64)
    count = len(batch.lengths)
    q, weights = queries(count, 64, 128, seed=4)
    table = batch.table.masked_fill(batch.table == UNMAPPED, 0)
    arguments = q, batch.cache, weights, table, None, on_device(batch.lengths), table.shape[1] * 64
    check(provider, INDEXER_LOGITS_PAGED, arguments, SUMS)


# The selection


def chosen(row: list[float], start: int, end: int, k: int) -> list[int]:
    """By a sort in Python: the largest, of equal ones the first; -inf and NaN do not take part."""
    columns = [s for s in range(start, end) if row[s] > -math.inf]
    best = sorted(sorted(columns, key=lambda s: (-row[s], s))[:k])
    return [s - start for s in best] + [-1] * (k - len(best))


def awkward_rows(rows: int, columns: int, seed: int, levels: int) -> Tensor:
    """Few distinct values, both zeros, -inf, NaN, and the largest and smallest numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels + 1, (rows, columns), generator=generator).float()
    values *= torch.rand(rows, 1, generator=generator)
    odd = torch.tensor([0.0, -0.0, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, math.inf])
    where = torch.rand(rows, columns, generator=generator) < 0.2
    return torch.where(where, odd[torch.randint(0, len(odd), (rows, columns), generator=generator)], values)


@harness.examples(40)
@given(st.integers(0, 4), st.integers(1, 20), st.integers(1, 25), st.booleans(), st.integers(0, 2**31))
def test_the_selection_is_a_sort(rows: int, columns: int, k: int, anywhere: bool, seed: int) -> None:
    logits = awkward_rows(rows, columns, seed, levels=3)
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, columns + 1, (rows, 2), generator=generator).sort(1).values.int()
    start = edges[:, 0] if anywhere else torch.zeros(rows, dtype=torch.int32)
    first = start.to(harness.DEVICE) if anywhere else None
    got = reference.topk_indices(logits.to(harness.DEVICE), first, edges[:, 1].to(harness.DEVICE), k, True)
    for t, row in enumerate(logits.tolist()):
        assert got[t].tolist() == chosen(row, int(start[t]), int(edges[t, 1]), k)


@pytest.mark.parametrize("provider", SELECTING)
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 700, 512), (3, 300, 20), (20, 90, 20), (2, 2500, 2048)])
def test_the_selection_is_torchs(provider: str, rows: int, columns: int, k: int, stable: bool) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = torch.stack([torch.randperm(columns, generator=generator) for _ in range(rows)]).float() - columns / 2
    logits = logits.to(harness.DEVICE)
    end = on_device([columns] * rows)
    check(provider, TOPK_INDICES, (logits, None, end, k, stable), EXACT)
    found = registry.implementation(TOPK_INDICES, provider)(logits, None, end, k, stable)
    found = found if stable else found.sort(dim=1).values
    assert torch.equal(found.long(), logits.topk(k, dim=1).indices.sort(dim=1).values)


@pytest.mark.parametrize("provider", GENERAL)
@pytest.mark.parametrize("block", [16, 64, 8192])
@harness.examples(5)
@given(st.data(), st.integers(0, 12), st.integers(1, 150), st.integers(1, 8), st.integers(0, 2**31))
def test_any_selection(
    provider: str, block: int, data: st.DataObject, rows: int, columns: int, k: int, seed: int
) -> None:
    """In one block, in several one after the other, and in parts that are merged."""
    triton_impl = pytest.importorskip("atom_patches.kernels.sparse_indexer.triton_impl")
    logits = awkward_rows(rows, columns, seed, levels=data.draw(st.sampled_from([1, 5, 10**6]))).to(harness.DEVICE)
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, columns + 1, (rows, 2), generator=generator).sort(1).values.int().to(harness.DEVICE)
    start = data.draw(st.sampled_from([None, edges[:, 0]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_impl, "LARGEST_BLOCK", block)
        check(provider, TOPK_INDICES, (logits, start, edges[:, 1], k, True), EXACT)
        wide = logits.T.contiguous().T
        check(provider, TOPK_INDICES, (wide, start, edges[:, 1], k, True), EXACT)


@pytest.mark.parametrize("provider", GENERAL)
@pytest.mark.parametrize("rows", [1, 5])
def test_equal_values_across_parts(provider: str, rows: int) -> None:
    """Everything equal: the first columns win, wherever the row is cut."""
    triton_impl = pytest.importorskip("atom_patches.kernels.sparse_indexer.triton_impl")
    logits = torch.zeros(rows, 300, device=harness.DEVICE)
    logits[:, ::2] = -0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_impl, "LARGEST_BLOCK", 64)
        found = triton_impl.topk_indices(logits, None, on_device([300] * rows), 20, True)
    assert found.tolist() == [list(range(20))] * rows


@pytest.mark.parametrize("provider", ["torch", *GENERAL])
@pytest.mark.parametrize("k", [3, 8])
def test_what_cannot_be_taken_leaves_its_place_empty(provider: str, k: int) -> None:
    logits = torch.full((2, 40), -math.inf, device=harness.DEVICE)
    logits[:, 5:9] = math.nan
    logits[0, [3, 30, 37]] = torch.tensor([-3e38, 0.5, -1.0], device=harness.DEVICE)
    call = logits, None, on_device([40, 40]), k, True
    check(provider, TOPK_INDICES, call, EXACT)
    found = registry.implementation(TOPK_INDICES, provider)(*call).tolist()
    assert found == [[3, 30, 37] + [-1] * (k - 3), [-1] * k]


@pytest.mark.skipif(not harness.GPU, reason="rows of 160,000 columns are too slow without a GPU")
@pytest.mark.parametrize("provider", SELECTING)
@pytest.mark.parametrize("rows", [1, 3, 64, 300])
def test_long_rows(provider: str, rows: int) -> None:
    """Exactly k, one more, one less, none, and all the columns."""
    columns, k = 163840, 2048
    generator = torch.Generator(harness.DEVICE).manual_seed(rows)
    logits = torch.randn(rows, columns, device=harness.DEVICE, generator=generator)
    lengths = [columns, k, k + 1, k - 1, 0, 50_000, columns - 1]
    end = on_device([lengths[t % len(lengths)] for t in range(rows)])
    check(provider, TOPK_INDICES, (logits, None, end, k, False), EXACT)
    check(provider, TOPK_INDICES, (logits, end // 2, end, k, False), EXACT)


@pytest.mark.parametrize("provider", SELECTING)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("from_zero", [False, True])
def test_the_selection_looks_at_the_range_only(provider: str, poison: float, from_zero: bool) -> None:
    """Around it lies what a provider of the logits may leave: anything."""
    rows, columns, k = (70, 9000, 2048) if harness.GPU else (5, 90, 20)
    generator = torch.Generator().manual_seed(columns)
    values = torch.stack([torch.randperm(columns, generator=generator) for _ in range(rows)]).float()
    edges = torch.randint(0, columns + 1, (rows, 2), generator=generator).sort(1).values.int()
    edges[0] = torch.tensor([3, 3 + k])
    start = edges[:, 0] * 0 if from_zero else edges[:, 0]
    column = torch.arange(columns)
    outside = (column < start[:, None]) | (column >= edges[:, 1:])
    logits, first, end = (x.to(harness.DEVICE) for x in (values.masked_fill(outside, poison), start, edges[:, 1]))
    end = end.contiguous()
    check(provider, TOPK_INDICES, (logits, None if from_zero else first.contiguous(), end, k, False), EXACT)


@pytest.mark.parametrize("provider", harness.providers(INDEXER_LOGITS))
def test_logits_may_hold_anything_where_nobody_looks(provider: str) -> None:
    """Ragged logits to selection, as one provider hands them to the other, columns beyond ranges poisoned."""
    rows, columns, k = (40, 3000, 512) if harness.GPU else (4, 70, 20)
    q, weights = queries(rows, 64, 128, seed=6)
    key = torch.randn(columns, 128, generator=torch.Generator().manual_seed(6)).to(FP8).to(harness.DEVICE)
    scale = torch.rand(columns, generator=torch.Generator().manual_seed(7)).to(harness.DEVICE)
    end = torch.arange(columns - rows, columns, dtype=torch.int32, device=harness.DEVICE)
    start = torch.full_like(end, 5)
    arguments = q, key, scale, weights, start, end
    if not (verdict := registry.supports(INDEXER_LOGITS, provider, arguments)).ok:
        pytest.skip(verdict.reason)
    with harness.poisoned():
        logits = registry.implementation(INDEXER_LOGITS, provider)(*arguments)
    served = registry.supports(TOPK_INDICES, provider, (logits, start, end, k, False)).ok
    who = provider if served else "torch"
    found = registry.implementation(TOPK_INDICES, who)(logits, start, end, k, False)
    for t in range(rows):
        seen = logits[t, 5 : int(end[t])]
        assert torch.equal(seen[found[t].long()].sort().values, seen.topk(k).values.sort().values)


@pytest.mark.parametrize(("rows", "columns"), [(3, 4096), (1, 131072)])
def test_the_benchmark_selects_from_values_without_equals(rows: int, columns: int) -> None:
    """Which of equal logits an engine takes it does not say: a benchmark with equal ones would call it wrong."""
    logits, _, end, _, _ = bench._topk(rows, columns).inputs(torch.device("cpu"))
    assert end.tolist() == [columns] * rows and logits.isfinite().all()
    assert all(len(row.unique()) == columns for row in logits)
    assert rows == 1 or not torch.equal(logits[0], logits[1])


# From positions to slots


@pytest.mark.parametrize("provider", ["torch", *GENERAL])
@harness.examples(15)
@given(st.data(), st.integers(0, 5), st.integers(0, 16), st.integers(0, 2**31))
def test_positions_to_slots(provider: str, data: st.DataObject, rows: int, count: int, seed: int) -> None:
    page, blocks = data.draw(st.sampled_from([1, 6])), data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 50, (max(rows, 3), blocks), generator=generator).int()
    indices = torch.randint(-2, (blocks + 1) * page, (rows, count), generator=generator).int()
    owners = torch.randint(-1, 3, (rows,), generator=generator).int()
    indices[owners < 0] = -1
    requests = data.draw(st.sampled_from([None, owners]))
    on_gpu = [None if x is None else x.to(harness.DEVICE) for x in (indices.T.contiguous().T, requests, table)]
    check(provider, LOCAL_TO_PAGED, (*on_gpu, page), EXACT)
    found = registry.implementation(LOCAL_TO_PAGED, provider)(*on_gpu, page).tolist()
    for t in range(rows):
        owner = t if requests is None else int(owners[t])
        for j, index in enumerate(indices[t].tolist()):
            mapped = 0 <= index < blocks * page
            assert found[t][j] == (int(table[owner, index // page]) * page + index % page if mapped else -1)


@pytest.mark.parametrize("provider", harness.providers(LOCAL_TO_PAGED))
def test_positions_to_slots_at_the_size_of_deepseek(provider: str) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 1000, (3, 40), generator=generator).int().to(harness.DEVICE)
    indices = torch.randint(-200, 42 * 64, (7, 256), generator=generator).int().to(harness.DEVICE)
    check(provider, LOCAL_TO_PAGED, (indices, on_device([0, 0, 2, 1, 1, 2, 0]), table, 64), EXACT)


@pytest.mark.parametrize("provider", harness.providers(LOCAL_TO_PAGED))
@pytest.mark.parametrize("width", [2048, 5001])
def test_positions_in_a_table_of_single_tokens(provider: str, width: int) -> None:
    """A table of a request's slots, one after the other; positions of nothing lie anywhere in the row."""
    generator = torch.Generator().manual_seed(width)
    table = torch.randint(1, 2**30, (5, width), generator=generator).int().to(harness.DEVICE)
    indices = torch.randint(0, width, (4, 2048), generator=generator).int()
    indices[torch.rand(4, 2048, generator=generator) < 0.3] = -1
    indices[1] = -1
    indices[2, [0, -1]] = torch.tensor([width - 1, width], dtype=torch.int32)
    check(provider, LOCAL_TO_PAGED, (indices.to(harness.DEVICE), None, table, 1), EXACT)


# All together


@pytest.mark.parametrize("provider", ["torch", *GENERAL])
@pytest.mark.parametrize("k", [8, 64])
def test_the_whole_way(provider: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in, best tokens out, attention over them: everything, while the context is shorter than k."""
    monkeypatch.setenv("ATOM_KERNELS", provider)
    page, lengths, size = 4, [23, 9], 32
    batch = Requests(lengths, size=size, page=page)
    generator = torch.Generator().manual_seed(7)
    where = on_device([slot for own in batch.slots for slot in own], torch.int64)
    latents = torch.randn(len(where), 48, generator=generator).to(harness.DEVICE)
    cache = torch.full((batch.cache.shape[0], page, 48), math.nan, device=harness.DEVICE)
    mla_cache_write(latents[:, :32], latents[:, 32:], where, cache)
    requests, visible = on_device([0, 0, 1]), on_device([22, 23, 9])
    q, weights = queries(3, 2, size, seed=8)
    logits = indexer_logits_paged(
        q, batch.cache, weights, batch.table, lengths=visible, max_seqlen_k=40, requests=requests
    )
    best = topk_indices(logits, end=visible, k=k)
    slots = local_to_paged(best, batch.table, block_size=page, requests=requests)
    queried = torch.randn(3, 4, 48, generator=generator).to(harness.DEVICE)
    out, lse = sparse_mla_attention(queried, cache, slots, scale=0.2, value_size=32)
    for t, (owner, length) in enumerate(((0, 22), (0, 23), (1, 9))):
        row = logits[t, :length].tolist()
        own = [batch.slots[owner][s] for s in chosen(row, 0, length, k) if s >= 0]
        assert len(own) == min(k, length)
        want = attention.sparse_mla_attention(
            queried[t : t + 1], cache, on_device([own]), 0.2, None, 32
        )  # fmt: skip
        torch.testing.assert_close(out[t : t + 1], want[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse[t : t + 1], want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("provider", ["torch", *GENERAL])
def test_nothing_to_do(provider: str) -> None:
    batch = Requests([3, 0])
    q, weights = queries(0, 2, 32, seed=0)
    none = batch.starts[:0]
    key = torch.zeros(5, 32, device=harness.DEVICE).to(FP8)
    scale = torch.ones(5, device=harness.DEVICE)
    logits = torch.zeros(0, 5, device=harness.DEVICE)
    check(provider, INDEXER_CACHE_WRITE, (key[:0].float(), none, batch.cache, True), EXACT)
    check(provider, INDEXER_LOGITS, (q, key, scale, weights, none, none), EXACT)
    check(provider, INDEXER_LOGITS_PAGED, (q, batch.cache, weights, batch.table, none, none, 9), EXACT)
    check(provider, TOPK_INDICES, (logits, None, none, 3, True), EXACT)
    check(provider, LOCAL_TO_PAGED, (none.view(0, 1), none, batch.table, 4), EXACT)
    q, weights = queries(2, 2, 32, seed=0)
    pair = batch.starts[:2] * 0
    check(provider, INDEXER_LOGITS, (q, key[:0], scale[:0], weights, pair, pair), EXACT)
    check(provider, INDEXER_LOGITS_PAGED, (q, batch.cache, weights, batch.table, None, pair, 0), EXACT)
    check(provider, TOPK_INDICES, (logits.new_zeros(2, 0), None, pair, 3, True), EXACT)


def test_as_torch_sees_it() -> None:
    batch = Requests([6, 3])
    q, weights = queries(2, 3, 32, seed=0)
    key, scale = reference.indexer_cache_gather(batch.cache, batch.table, batch.starts, 9)
    lengths, slots = on_device([6, 2]), on_device([1, -1])
    logits = torch.zeros(2, 9, device=harness.DEVICE)
    calls: tuple[tuple[Any, ...], ...] = (
        (*queries_to_turn(2, 3, 32, 8, torch.bfloat16, seed=0), True),
        (torch.ones(2, 32, device=harness.DEVICE), slots, batch.cache.clone().zero_(), True),
        (batch.cache, batch.table, batch.starts, 9),
        (q, key, scale, weights, lengths * 0, lengths),
        (q, batch.cache, weights, batch.table, None, lengths, 8),
        (logits, None, lengths, 4, True),
        (lengths.view(2, 1), None, batch.table, 4),
    )
    returns_fp8 = INDEXER_CACHE_GATHER, INDEXER_QUERIES
    for operation, arguments in zip(OPERATIONS, calls, strict=True):
        if any(isinstance(x, Tensor) and x.dtype == FP8 for x in arguments) or operation in returns_fp8:
            # The rest of opcheck compares tensors before and after, and torch cannot compare this dtype.
            torch.library.opcheck(operation.operator, arguments, test_utils=("test_faketensor",))
        else:
            harness.opcheck(operation, arguments)


def test_wrong_arguments_are_named() -> None:
    batch = Requests([6, 3])
    q, weights = queries(2, 3, 32, seed=0)
    lengths = on_device([6, 2])
    with pytest.raises(ValueError, match=r"weights \[T, H\] must agree"):
        indexer_logits_paged(q, batch.cache, weights[:1], batch.table, lengths=lengths, max_seqlen_k=8)
    with pytest.raises(ValueError, match=r"28 \+ 4"):
        indexer_logits_paged(q[..., :28], batch.cache, weights, batch.table, lengths=lengths, max_seqlen_k=8)
    with pytest.raises(ValueError, match="must be dense"):
        indexer_cache_write(weights.new_ones(2, 32), lengths, batch.cache.expand(-1, 4, -1)[:, ::2])
    with pytest.raises(ValueError, match=r"requests must be \[2\]"):
        local_to_paged(lengths.view(2, 1), batch.table, block_size=4, requests=lengths[:1])
    with pytest.raises(ValueError, match="k > 0"):
        topk_indices(weights, end=lengths, k=0)
    with pytest.raises(ValueError, match=r"start and end must be \[2\]"):
        key = torch.zeros(3, 32, device=harness.DEVICE).to(FP8)
        indexer_logits(q, key, weights[0], weights, start=lengths[:1], end=lengths)


def room_for(gigabytes: float) -> None:
    """Skip where there is no GPU, or too little of it is free."""
    if not harness.GPU:
        pytest.skip(f"needs {gigabytes} GB of a GPU")
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB, {free:.1f} are free")


@pytest.mark.parametrize("provider", [name for name in harness.providers(TOPK_INDICES) if name != "torch"])
def test_a_cache_of_more_than_two_to_the_31_bytes(provider: str) -> None:
    room_for(4)
    page, size = 64, 128
    blocks = 2**31 // (page * (size + 4)) + 20
    cache = torch.empty(blocks, page, size + 4, dtype=torch.uint8, device=harness.DEVICE).fill_(0xFF)
    keys = torch.randn(128, size, generator=torch.Generator().manual_seed(0)).to(harness.DEVICE, torch.bfloat16)
    slots = torch.arange(blocks * page - 128, blocks * page, device=harness.DEVICE)
    call = keys, slots, cache, True
    if not (verdict := registry.supports(INDEXER_CACHE_WRITE, provider, call)).ok:
        pytest.skip(verdict.reason)
    registry.implementation(INDEXER_CACHE_WRITE, provider)(*call)
    small = poisoned_cache(2, page, size)
    reference.indexer_cache_write(keys, slots - slots[0], small, True)
    assert torch.equal(cache[-2:], small)
    # Not the keys' seed: of a query that equals a key, a sum of positive terms, Hopper's FP8 units lose the last bits.
    q, weights = queries(1, 64, size, seed=4)
    paged = q, cache, weights / 8, on_device([[blocks - 2, blocks - 1]]), None, on_device([100]), 128
    if not (verdict := registry.supports(INDEXER_LOGITS_PAGED, provider, paged)).ok:
        pytest.skip(verdict.reason)
    got = registry.implementation(INDEXER_LOGITS_PAGED, provider)(*paged)
    want = reference.indexer_logits_paged(*paged)
    torch.testing.assert_close(got[:, :100], want[:, :100], rtol=SUMS[0], atol=SUMS[1])


@pytest.mark.parametrize("provider", [name for name in harness.providers(TOPK_INDICES) if name != "torch"])
def test_rows_beyond_two_to_the_31_elements(provider: str) -> None:
    room_for(10)
    rows, columns = 2**31 // 32768 + 8, 32768
    logits = torch.empty(rows, columns, device=harness.DEVICE)
    logits[-8:] = torch.stack([torch.randperm(columns, device=harness.DEVICE) for _ in range(8)]).float()
    end = torch.zeros(rows, dtype=torch.int32, device=harness.DEVICE)
    start = end.clone()
    end[-8:] = columns
    call = logits, start, end, 2048, False
    if not (verdict := registry.supports(TOPK_INDICES, provider, call)).ok:
        pytest.skip(verdict.reason)
    found = registry.implementation(TOPK_INDICES, provider)(*call)
    assert torch.equal(found[-8:].long().sort(dim=1).values, logits[-8:].topk(2048, dim=1).indices.sort(dim=1).values)
