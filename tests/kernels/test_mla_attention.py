"""Latent attention: the formula in float64, the cache's bytes by hand, and every provider against the reference."""

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
from atom_patches.kernels.mla_attention import (
    MLA_ATTENTION,
    MLA_CACHE_WRITE,
    SPARSE_MLA_ATTENTION,
    TOLERANCE,
    mla_attention,
    mla_cache_write,
    reference,
    sparse_mla_attention,
)
from atom_patches.kernels.mla_attention.layout import packed_bytes

PROVIDERS = harness.providers(MLA_ATTENTION)
#: The reference is held to the formula; generated shapes are for those that take any.
GENERAL = [name for name in PROVIDERS if name == "triton"]
LAYOUTS = ("plain", "scaled", "packed")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNMAPPED = 2**30


def made_cache(layout: str, blocks: int, page: int, latent: int, rope: int, dtype: str, spread: int = 1) -> Tensor:
    """A cache of NaN in every value and scale; `spread` > 1: its blocks are every spread-th of a larger one."""
    if layout == "plain":
        cache = torch.full((blocks * spread, page, latent + rope), math.nan, dtype=DTYPES[dtype])
    elif layout == "scaled":
        cache = torch.full((blocks * spread, page, latent + rope), 0x7F, dtype=torch.uint8)
    else:
        cache = torch.full((blocks * spread, page, packed_bytes(latent, rope)), 0xFF, dtype=torch.uint8)
    return cache.to(harness.DEVICE)[::spread]


class Batch:
    """Ragged sequences in a scrambled paged cache: what no query sees is NaN, what maps nothing is out of range."""

    def __init__(
        self,
        queries: list[int],
        keys: list[int],
        *,
        heads: int = 2,
        sizes: tuple[int, int] = (128, 16),
        page: int = 4,
        layout: str = "plain",
        dtype: str = "float32",
        tail: int = 0,
        spread: int = 1,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        latent, rope = sizes
        self.queries, self.keys, self.sizes, self.page = queries, keys, sizes, page
        self.scale = (latent + rope) ** -0.5
        pages = [-(-length // page) for length in keys]
        blocks = sum(pages) + 3
        order = torch.randperm(blocks, generator=generator).tolist()
        table = torch.full((len(keys), max([1, *pages]) + 1), UNMAPPED, dtype=torch.int32)
        for i, count in enumerate(pages):
            for j in range(count):
                table[i, j] = order.pop()
        self.slots = [[int(table[i, p // page]) * page + p % page for p in range(n)] for i, n in enumerate(keys)]
        self.table = table.to(harness.DEVICE)
        self.cache_scale = torch.tensor([0.017]).to(harness.DEVICE) if layout == "scaled" else None
        self.cache = made_cache(layout, blocks, page, latent, rope, dtype, spread)
        every = [slot for own in self.slots for slot in own]
        values = torch.randn(len(every), latent + rope, generator=generator).to(harness.DEVICE, DTYPES[dtype])
        where = torch.tensor(every, dtype=torch.int64).to(harness.DEVICE)
        reference.mla_cache_write(values[:, :latent], values[:, latent:], where, self.cache, self.cache_scale)
        self.rows = sum(queries) + tail
        q = torch.randn(self.rows, heads, latent + rope, generator=generator)
        self.q = q.to(harness.DEVICE, DTYPES[dtype])
        self.q[sum(queries) :] = math.nan
        self.starts = torch.tensor([0, *queries]).cumsum(0).to(harness.DEVICE, torch.int32)
        self.lengths = torch.tensor(keys, dtype=torch.int32).to(harness.DEVICE)

    def dense(self) -> tuple[Any, ...]:
        most = max([1, *self.queries]), max([1, *self.keys])
        where = self.table, self.starts, self.lengths
        return self.q, self.cache, *where, *most, self.scale, self.cache_scale, self.sizes[0]

    def sparse(self, indices: Tensor) -> tuple[Any, ...]:
        return self.q, self.cache, indices.to(harness.DEVICE), self.scale, self.cache_scale, self.sizes[0]

    def seen(self) -> list[list[int]]:
        """The slots that each query row sees."""
        found: list[list[int]] = []
        for count, length, slots in zip(self.queries, self.keys, self.slots, strict=True):
            found += [slots[: max(0, length - count + 1 + i)] for i in range(count)]
        return found + [[] for _ in range(self.rows - len(found))]


def formula(batch: Batch, seen: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Row by row and head by head, in float64."""
    latent = batch.sizes[0]
    out = torch.zeros(batch.rows, batch.q.shape[1], latent, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    for t, slots in enumerate(seen):
        keys = [dequantised(batch, slot) for slot in slots]
        for h in range(batch.q.shape[1]):
            if not keys:
                continue
            query = batch.q[t, h].double().cpu()
            weights = [math.exp(batch.scale * float(query @ key)) for key in keys]
            out[t, h] = sum((w * key[:latent] for w, key in zip(weights, keys, strict=True)), start=out[t, h]) / sum(
                weights
            )
            lse[t, h] = math.log(sum(weights))
    return out, lse


def dequantised(batch: Batch, slot: int) -> Tensor:
    """One row of the cache in float64, by hand."""
    latent, rope = batch.sizes
    row = batch.cache[slot // batch.page, slot % batch.page].cpu()
    if row.dtype != torch.uint8:
        return row.double()
    raw = bytes(row.tolist())

    def decode(code: int) -> float:
        return e4m3.value(code & 0x7F) * (-1.0 if code & 0x80 else 1.0)

    if batch.cache_scale is not None:
        return torch.tensor([decode(code) for code in raw]).double() * float(batch.cache_scale)
    scales = struct.unpack(f"<{latent // 128}f", raw[latent : latent + latent // 32])
    left = [decode(code) * scales[i // 128] for i, code in enumerate(raw[:latent])]
    right = struct.unpack(f"<{rope}H", raw[latent + latent // 32 :])
    return torch.tensor(left + [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in right]).double()


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-5)


def check(provider: str, operation: registry.Operation, arguments: tuple[Any, ...], dtype: str) -> None:
    verdict = registry.supports(operation, provider, arguments)
    if not verdict.ok and provider != "triton":
        pytest.skip(verdict.reason)
    harness.check(operation, provider, arguments, tolerance=TOLERANCE[dtype])


def some_of(batch: Batch, count: int, seed: int, unused: float = 0.4) -> Tensor:
    """For every query `count` slots in use somewhere, or -1 in their place; for the rows after them -1 only."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.tensor([slot for own in batch.slots for slot in own] or [-1])
    chosen = every[torch.randint(0, len(every), (batch.rows, count), generator=generator)]
    chosen[sum(batch.queries) :] = -1
    return chosen.masked_fill(torch.rand(batch.rows, count, generator=generator) < unused, -1).int()


# The reference


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_formula(layout: str) -> None:
    dtype = "float32" if layout == "plain" else "bfloat16"
    batch = Batch([3, 0, 1, 2], [9, 4, 6, 2], layout=layout, dtype=dtype, tail=1)
    batch.q = batch.q.float()
    q, *rest = batch.dense()
    for got, want in zip(reference.mla_attention(q, *rest), formula(batch, batch.seen()), strict=True):
        close(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sparse_reference_is_the_formula(layout: str) -> None:
    dtype = "float32" if layout == "plain" else "bfloat16"
    batch = Batch([3, 2], [9, 6], layout=layout, dtype=dtype)
    batch.q = batch.q.float()
    indices = some_of(batch, 5, seed=1)
    indices[1] = -1
    used = [[int(slot) for slot in row if slot >= 0] for row in indices]
    for got, want in zip(reference.sparse_mla_attention(*batch.sparse(indices)), formula(batch, used), strict=True):
        close(got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_packed_rows_are_read_in_the_queries_dtype(dtype: str) -> None:
    """A product of that dtype takes no others; where few keys cancel, what they lose is most of the result."""
    batch = Batch([3], [9], layout="packed", dtype="bfloat16")
    batch.q = batch.q.to(DTYPES[dtype])
    rounded = torch.zeros(
        batch.cache.shape[0], batch.page, sum(batch.sizes), dtype=DTYPES[dtype], device=harness.DEVICE
    )
    for slot in batch.slots[0]:
        rounded[slot // batch.page, slot % batch.page] = dequantised(batch, slot).to(rounded)
    q, _, indices, *rest = batch.sparse(some_of(batch, 5, seed=1))
    packed, plain = (reference.sparse_mla_attention(q, cache, indices, *rest) for cache in (batch.cache, rounded))
    assert all(map(torch.equal, packed, plain))


def test_fewer_tokens_than_queries_leave_the_first_ones_blind() -> None:
    batch = Batch([4], [2])
    out, lse = reference.mla_attention(*batch.dense())
    want, log_sum = formula(batch, [[], [], batch.slots[0][:1], batch.slots[0]])
    close(out, want)
    close(lse, log_sum)


# The cache


def rows_to_write(count: int, sizes: tuple[int, int], dtype: str, seed: int) -> tuple[Tensor, Tensor]:
    """Values over many magnitudes, with zeros and a row of nothing else."""
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.randn(count, sum(sizes), generator=generator) * torch.randn(count, 1, generator=generator).mul(4).exp()
    )
    values[torch.rand(values.shape, generator=generator) < 0.1] = 0.0
    values[count // 2] = 0.0
    values = values.to(harness.DEVICE, DTYPES[dtype])
    return values[:, : sizes[0]], values[:, sizes[0] :]


def test_the_bytes_of_a_packed_row() -> None:
    latent, rope = rows_to_write(5, (512, 64), "bfloat16", seed=3)
    cache = made_cache("packed", 2, 4, 512, 64, "bfloat16")
    mla_cache_write(latent, rope, torch.tensor([6, -1, 0, 3, 5], device=harness.DEVICE), cache)
    assert cache.shape[2] == 656
    for i, slot in ((0, 6), (2, 0), (3, 3), (4, 5)):
        want = b""
        scales = []
        for g in range(4):
            group = latent[i, 128 * g : 128 * g + 128].float().tolist()
            scales.append(max(e4m3.single(max(abs(x) for x in group) / 448.0), 2.0**-126))
            want += e4m3.encode_all(group, scales[g])
        want += struct.pack("<4f", *scales)
        want += b"".join(struct.pack("<f", x)[2:] for x in rope[i].float().tolist())
        assert bytes(cache[slot // 4, slot % 4].tolist()) == want, f"row {i}"
    untouched = [1, 2, 4, 7]
    assert bool((cache.flatten(0, 1)[untouched] == 0xFF).all())


def test_the_bytes_of_a_scaled_row() -> None:
    latent, rope = rows_to_write(4, (128, 16), "float32", seed=4)
    cache = made_cache("scaled", 2, 4, 128, 16, "float32")
    scale = torch.tensor([0.013], device=harness.DEVICE)
    mla_cache_write(latent, rope, torch.tensor([1, 7, -1, 2], device=harness.DEVICE), cache, cache_scale=scale)
    for i, slot in ((0, 1), (1, 7), (3, 2)):
        values = [*latent[i].tolist(), *rope[i].tolist()]
        assert bytes(cache[slot // 4, slot % 4].tolist()) == e4m3.encode_all(values, float(scale)), f"row {i}"
    assert bool((cache.flatten(0, 1)[[0, 3, 4, 5, 6]] == 0x7F).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("provider", GENERAL)
@harness.examples(8)
@given(st.data(), st.integers(0, 2**31))
def test_any_write(provider: str, layout: str, data: st.DataObject, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    sizes = data.draw(st.sampled_from([(128, 16), (384, 24)] if layout == "packed" else [(48, 8), (300, 20)]))
    page, count = data.draw(st.sampled_from([1, 6])), data.draw(st.integers(0, 9))
    latent, rope = rows_to_write(count + 1, sizes, dtype, seed)
    blocks = -(-count // page) + 1
    slots = torch.randperm(blocks * page, generator=generator)[: count + 1]
    slots[torch.rand(count + 1, generator=generator) < 0.3] = -1
    slots = slots.to(harness.DEVICE, data.draw(st.sampled_from([torch.int32, torch.int64])))
    cache = made_cache(layout, blocks, page, *sizes, dtype, spread=data.draw(st.integers(1, 2)))
    scale = torch.tensor([0.7], device=harness.DEVICE) if layout == "scaled" else None
    harness.check(MLA_CACHE_WRITE, provider, (latent, rope, slots, cache, scale), tolerance=(0.0, 0.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("provider", harness.providers(MLA_CACHE_WRITE))
def test_write_at_the_size_of_deepseek(provider: str, layout: str) -> None:
    latent, rope = (part.contiguous() for part in rows_to_write(9, (512, 64), "bfloat16", seed=5))
    cache = made_cache(layout, 2, 64, 512, 64, "bfloat16")
    slots = torch.tensor([127, 3, -1, 64, 63, 0, -1, 90, 17], device=harness.DEVICE)
    scale = torch.tensor([0.25], device=harness.DEVICE) if layout == "scaled" else None
    arguments = latent, rope, slots, cache, scale
    verdict = registry.supports(MLA_CACHE_WRITE, provider, arguments)
    if not verdict.ok:
        pytest.skip(verdict.reason)
    harness.check(MLA_CACHE_WRITE, provider, arguments, tolerance=(0.0, 0.0))


# Attention


LENGTHS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=5)
#: What each layout is tried with: every dtype, size and page is a kernel of its own to compile.
TRIED: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float32", "sizes": (64, 16)},
    "scaled": {"dtype": "bfloat16", "sizes": (64, 16)},
    "packed": {"dtype": "bfloat16", "sizes": (128, 16)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("provider", GENERAL)
@harness.examples(6)
@given(st.data(), LENGTHS, st.integers(0, 2**31))
def test_any_ragged_batch(
    provider: str, layout: str, data: st.DataObject, lengths: list[tuple[int, int]], seed: int
) -> None:
    batch = Batch(
        [queries for queries, _ in lengths],
        [queries + past if queries else past for queries, past in lengths],
        heads=data.draw(st.sampled_from([3, 20, 32])),
        page=data.draw(st.sampled_from([1, 6, 64])) if layout == "plain" else {"scaled": 64, "packed": 6}[layout],
        layout=layout,
        tail=data.draw(st.integers(0, 3)),
        spread=data.draw(st.integers(1, 2)),
        seed=seed,
        **TRIED[layout],
    )
    check(provider, MLA_ATTENTION, batch.dense(), TRIED[layout]["dtype"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("provider", GENERAL)
@harness.examples(6)
@given(st.data(), LENGTHS, st.integers(0, 40), st.integers(0, 2**31))
def test_any_choice_of_tokens(
    provider: str, layout: str, data: st.DataObject, lengths: list[tuple[int, int]], count: int, seed: int
) -> None:
    batch = Batch(
        [queries for queries, _ in lengths],
        [past for _, past in lengths],
        heads=data.draw(st.sampled_from([3, 20])),
        page=data.draw(st.sampled_from([1, 6, 64])),
        layout=layout,
        spread=data.draw(st.integers(1, 2)),
        seed=seed,
        **TRIED[layout],
    )
    indices = some_of(batch, count, seed, unused=data.draw(st.sampled_from([0.0, 0.4, 0.95])))
    check(provider, SPARSE_MLA_ATTENTION, batch.sparse(indices), TRIED[layout]["dtype"])


@pytest.mark.parametrize("provider", GENERAL)
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_over_divided_keys(provider: str, queries: int) -> None:
    """Sequences of very different lengths: some have fewer divisions with keys than there are, some have none."""
    triton_impl = pytest.importorskip("atom_patches.kernels.mla_attention.triton_impl")
    batch = Batch([queries, queries, 0, queries], [300, 70, 9, 3], sizes=(16, 16), page=16, tail=2)
    call = batch.dense()
    layout = triton_impl.layout_of(call[1], 16, 16)
    assert triton_impl._config(lambda rows: 4, 2 * queries, 300, layout, call[0]).splits > 1
    check(provider, MLA_ATTENTION, call, "float32")


@pytest.mark.parametrize("provider", GENERAL)
def test_more_heads_than_a_block_holds(provider: str) -> None:
    batch = Batch([2, 0, 1], [9, 3, 5], heads=128, sizes=(16, 16), tail=1)
    check(provider, MLA_ATTENTION, batch.dense(), "float32")
    check(provider, SPARSE_MLA_ATTENTION, batch.sparse(some_of(batch, 5, seed=0)), "float32")


@pytest.mark.parametrize("provider", GENERAL)
def test_divided_choices_of_tokens(provider: str) -> None:
    """Of 300 places only the first are in use in one row, only the last in another, none in a third."""
    batch = Batch([4], [300], sizes=(16, 16), page=16)
    indices = torch.full((4, 300), -1, dtype=torch.int32)
    indices[0, :5] = torch.tensor(batch.slots[0][:5])
    indices[1, -2:] = torch.tensor(batch.slots[0][-2:])
    indices[3] = torch.tensor(batch.slots[0]).flip(0)
    check(provider, SPARSE_MLA_ATTENTION, batch.sparse(indices), "float32")


@pytest.mark.parametrize("provider", GENERAL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_log_sum_is_not_rounded_to_the_queries_dtype(provider: str, dtype: str) -> None:
    batch = Batch([2, 1], [50, 33], dtype=dtype)
    want = reference.mla_attention(*batch.dense())[1]
    got = registry.implementation(MLA_ATTENTION, provider)(*batch.dense())[1]
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("provider", GENERAL)
def test_queries_and_tables_at_any_stride(provider: str) -> None:
    batch = Batch([2, 3], [9, 30], heads=3, tail=1)
    q, cache, table, starts, lengths, *rest = batch.dense()
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    table, starts, lengths = table.T.contiguous().T, harness.spread(starts), harness.spread(lengths)
    check(provider, MLA_ATTENTION, (q, cache, table, starts, lengths, *rest), "float32")
    indices = some_of(batch, 7, seed=0).T.contiguous().T
    check(provider, SPARSE_MLA_ATTENTION, (q, *batch.sparse(indices)[1:]), "float32")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("queries", [1, 2])
def test_decode_at_the_size_of_deepseek(provider: str, queries: int, heads: int) -> None:
    heads = heads if harness.GPU else 3 if provider == "triton" else 16
    batch = Batch([queries] * 3, [70, 2, 130], heads=heads, sizes=(512, 64), page=64, dtype="bfloat16", seed=queries)
    batch.table = batch.table[:, :3].contiguous()
    check(provider, MLA_ATTENTION, batch.dense(), "bfloat16")


@pytest.mark.parametrize("provider", harness.providers(SPARSE_MLA_ATTENTION))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_choices_at_the_size_of_deepseek(provider: str, layout: str, heads: int) -> None:
    if not harness.GPU and heads > 16:
        pytest.skip("too slow without a GPU")
    batch = Batch([4], [200], heads=heads, sizes=(512, 64), page=64, layout=layout, dtype="bfloat16")
    indices = some_of(batch, 128, seed=2)
    indices[2] = -1
    check(provider, SPARSE_MLA_ATTENTION, batch.sparse(indices), "bfloat16")


@pytest.mark.parametrize("layout", ["scaled", "packed"])
def test_eight_bits_cost_less_than_four_percent(layout: str) -> None:
    exact = Batch([2, 3], [60, 90], sizes=(128, 16), dtype="bfloat16")
    coarse = Batch([2, 3], [60, 90], sizes=(128, 16), dtype="bfloat16", layout=layout)
    assert torch.equal(exact.q, coarse.q)
    want, got = (reference.mla_attention(*batch.dense())[0].float() for batch in (exact, coarse))
    error = float((got - want).norm() / want.norm())
    assert 1e-3 < error < 0.04, error


@pytest.mark.parametrize("provider", PROVIDERS)
def test_all_tokens_chosen_is_dense(provider: str) -> None:
    batch = Batch([3, 1], [20, 7], dtype="bfloat16")
    rows = batch.seen()
    indices = torch.full((batch.rows, 20), -1, dtype=torch.int32)
    for t, slots in enumerate(rows):
        indices[t, 20 - len(slots) :] = torch.tensor(slots)
    call = batch.sparse(indices)
    verdict = registry.supports(SPARSE_MLA_ATTENTION, provider, call)
    if not verdict.ok:
        pytest.skip(verdict.reason)
    dense = reference.mla_attention(*batch.dense())
    sparse = registry.implementation(SPARSE_MLA_ATTENTION, provider)(*call)
    torch.testing.assert_close(sparse[0], dense[0], rtol=TOLERANCE["bfloat16"][0], atol=TOLERANCE["bfloat16"][1])
    torch.testing.assert_close(sparse[1], dense[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name in ("torch", "triton")])
def test_nothing_to_do(provider: str) -> None:
    batch = Batch([0, 0], [3, 0])
    check(provider, MLA_ATTENTION, batch.dense(), "float32")
    check(provider, SPARSE_MLA_ATTENTION, batch.sparse(torch.zeros(0, 5, dtype=torch.int32)), "float32")
    unused = Batch([2], [2])
    check(provider, SPARSE_MLA_ATTENTION, unused.sparse(torch.zeros(2, 0, dtype=torch.int32)), "float32")
    q, cache = batch.q, batch.cache
    empty = q.new_empty(0, 128), q.new_empty(0, 16), batch.lengths[:0], cache, None
    harness.check(MLA_CACHE_WRITE, provider, empty, tolerance=(0.0, 0.0))


def test_as_torch_sees_it() -> None:
    batch = Batch([2, 1], [5, 3], layout="packed", dtype="bfloat16", tail=1)
    harness.opcheck(MLA_ATTENTION, batch.dense())
    harness.opcheck(SPARSE_MLA_ATTENTION, batch.sparse(some_of(batch, 4, seed=0)))
    latent, rope = rows_to_write(3, (128, 16), "bfloat16", seed=0)
    slots = torch.tensor([1, -1, 4], device=harness.DEVICE)
    harness.opcheck(MLA_CACHE_WRITE, (latent, rope, slots, batch.cache, None))


def test_the_public_functions_give_every_argument() -> None:
    batch = Batch([2, 1], [5, 3], tail=1)
    q, cache, table, starts, lengths, most_q, most_k, scale, _, size = batch.dense()
    got = mla_attention(
        q, cache, table, cu_seqlens_q=starts, seq_lens_k=lengths, max_seqlen_q=most_q, max_seqlen_k=most_k,
        scale=scale, value_size=size,
    )  # fmt: skip
    want = formula(batch, batch.seen())
    close(got[0], want[0])
    indices = some_of(batch, 3, seed=0)
    sparse = sparse_mla_attention(q, cache, indices.to(harness.DEVICE), scale=scale, value_size=size)
    close(sparse[1][:3], formula(batch, [[int(s) for s in row if s >= 0] for row in indices])[1][:3])


def test_wrong_arguments_are_named() -> None:
    batch = Batch([2, 1], [5, 3])
    q, cache, table, starts, lengths, *_ = batch.dense()
    common: dict[str, Any] = {"max_seqlen_q": 2, "max_seqlen_k": 5, "scale": 1.0, "value_size": 128}
    with pytest.raises(ValueError, match=r"cu_seqlens_q \[3\]"):
        mla_attention(q, cache, table, cu_seqlens_q=starts[1:], seq_lens_k=lengths, **common)
    with pytest.raises(ValueError, match="rows of 143 is none for a latent of 128"):
        mla_attention(q, cache[..., 1:], table, cu_seqlens_q=starts, seq_lens_k=lengths, **common)
    with pytest.raises(ValueError, match="more than value_size = 144"):
        sparse_mla_attention(q, cache, table, scale=1.0, value_size=144)
    with pytest.raises(ValueError, match=r"indices must be \[3, any\]"):
        sparse_mla_attention(q, cache, table, scale=1.0, value_size=128)
    scaled = made_cache("scaled", 1, 4, 128, 16, "float32")
    with pytest.raises(ValueError, match="cache_scale belongs to"):
        mla_cache_write(q[:, 0, :128], q[:, 0, 128:], lengths[[0, 0, 0]], scaled)
    with pytest.raises(ValueError, match="must agree"):
        mla_cache_write(q[:, 0, :128], q[:, 0, 128:], lengths, cache)


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name in ("triton", "engine")])
def test_slots_beyond_two_to_the_31_elements(provider: str) -> None:
    if not harness.GPU or torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of a GPU")
    page, wide = 64, 576
    blocks = 2**31 // (page * wide) + 20
    cache = torch.full((blocks, page, wide), math.nan, dtype=torch.bfloat16, device=harness.DEVICE)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(128, wide, generator=generator).to(harness.DEVICE, torch.bfloat16)
    slots = torch.arange(blocks * page - 128, blocks * page, device=harness.DEVICE)
    latent, rope = values[:, :512].contiguous(), values[:, 512:].contiguous()
    writer = provider if provider in harness.providers(MLA_CACHE_WRITE) else "triton"
    registry.implementation(MLA_CACHE_WRITE, writer)(latent, rope, slots, cache, None)
    assert torch.equal(cache[-2:].flatten(0, 1), values)
    q = torch.randn(1, 128, wide, generator=generator).to(harness.DEVICE, torch.bfloat16)
    table = torch.tensor([[blocks - 2, blocks - 1]], dtype=torch.int32, device=harness.DEVICE)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=harness.DEVICE) for x in ([0, 1], [128]))
    want = reference.mla_attention(q, cache, table, starts, lengths, 1, 128, 0.05, None, 512)
    calls = {
        MLA_ATTENTION: (q, cache, table, starts, lengths, 1, 128, 0.05, None, 512),
        SPARSE_MLA_ATTENTION: (q, cache, slots[None].int(), 0.05, None, 512),
    }
    served = [operation for operation, call in calls.items() if registry.supports(operation, provider, call).ok]
    if not served:
        pytest.skip(
            f"{provider} serves neither: {registry.supports(MLA_ATTENTION, provider, calls[MLA_ATTENTION]).reason}"
        )
    for operation in served:
        got = registry.implementation(operation, provider)(*calls[operation])
        torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(got[1], want[1], rtol=1e-3, atol=1e-3)
