"""Paged attention: the softmax formula in float64, and every provider against the reference on ragged batches.

Every row of the cache that no query row may see holds NaN, and block tables go on behind a sequence's end to such a
page; so a key read too many shows. FlashAttention 3 multiplies the rest of a last page by 0: for kernels that are not
this package's these rows hold a large number instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.kernels import contract, registry
from atom_patches.kernels.paged_attention import PAGED_ATTENTION, TOLERANCE, paged_attention, triton_impl

PROVIDERS = harness.providers(PAGED_ATTENTION)
OWN = [provider for provider in PROVIDERS if provider in ("torch", "triton")]
"""Those that serve all that the schema admits, and leave unseen rows of the cache alone, whatever they hold."""

EACH = [(p, "float32" if p in OWN and not harness.GPU else "bfloat16") for p in PROVIDERS]
"""Providers and dtypes for what does not depend on the dtype; on a GPU float32 would take another path."""

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Batch:
    """A generated call. `tail` rows lie behind the last sequence; `unseen` is what rows that nobody may read hold."""

    query_lens: Sequence[int]
    key_lens: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    tail: int = 0
    unseen: float = math.nan
    seed: int = 0

    def arguments(
        self,
        *,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float = 0.0,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        positions: Sequence[int] | None = None,
        padded: bool = True,
    ) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        pages = [-(-keys // self.page) for keys in self.key_lens]
        order = torch.randperm(sum(pages), generator=generator).split(pages)
        nobodys = sum(pages)
        table = torch.full((len(pages), max([*pages, 0]) + 1), nobodys, dtype=torch.int32)
        caches = [torch.full((nobodys + 1, self.page, self.heads[1], size), self.unseen) for size in self.sizes]
        for i, keys in enumerate(self.key_lens):
            table[i, : pages[i]] = order[i]
            place = torch.arange(keys)
            for cache in caches:
                rows = torch.randn(keys, *cache.shape[2:], generator=generator)
                cache[order[i][place // self.page], place % self.page] = rows
        rows = sum(self.query_lens) + self.tail
        q = torch.randn(rows, self.heads[0], self.sizes[0], generator=generator) * 2
        starts = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0).tolist()], dtype=torch.int32)
        key, value = (cache.to(self.cache_dtype or self.dtype) for cache in caches)
        call = (
            q.to(self.dtype), key, value, table, starts, torch.tensor(self.key_lens, dtype=torch.int32),
            max([*self.query_lens, 0]), max([*self.key_lens, 0]), self.sizes[0] ** -0.5, causal, window, soft_cap,
            k_scale, v_scale, None if positions is None else torch.tensor(positions, dtype=torch.int32), padded,
        )  # fmt: skip
        return on_device(call)


def on_device(call: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(harness.DEVICE) if isinstance(x, torch.Tensor) else x for x in call)


def named(call: tuple[Any, ...]) -> dict[str, Any]:
    """The same arguments by the schema's names."""
    return {argument.name: x for argument, x in zip(PAGED_ATTENTION.operator._schema.arguments, call, strict=True)}


def check(provider: str, call: tuple[Any, ...]) -> None:
    harness.check(PAGED_ATTENTION, provider, call, tolerance=TOLERANCE[registry.dtype_name(call[0].dtype)])
    if harness.GPU and provider in OWN:
        # Narrower than half a percent, so that not one key among hundreds can be missing.
        lse = registry.implementation(PAGED_ATTENTION, provider)(*call)[1]
        torch.testing.assert_close(lse, PAGED_ATTENTION.reference(*call)[1], rtol=1e-4, atol=2e-4)


def unseen(provider: str) -> float:
    return math.nan if provider in OWN else 1e4


# The formula


def by_the_formula(call: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, a row and a head at a time, from the list of keys that it sees."""
    q, key_cache, value_cache, table, starts, lengths, _, _, scale, causal, window, cap, k_scale, v_scale, at, _ = call
    rows, heads, _ = q.shape
    page, kv_heads = key_cache.shape[1:3]
    out = torch.zeros(rows, heads, value_cache.shape[3], dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for i, keys in enumerate(lengths.tolist()):
        first, last = int(starts[i]), int(starts[i + 1])
        for row in range(first, last):
            position = keys - last + row if at is None else int(at[row])
            seen = [j for j in range(keys) if not causal or j <= position]
            seen = [j for j in seen if window is None or j > position - window]
            for head in range(heads):
                group = head // (heads // kv_heads)
                logits, values = [], []
                for j in seen:
                    block, slot = int(table[i, j // page]), j % page
                    dot = float(q[row, head].double() @ key_cache[block, slot, group].double())
                    logit = dot * scale * (1.0 if k_scale is None else float(k_scale.expand(kv_heads)[group]))
                    logits.append(cap * math.tanh(logit / cap) if cap else logit)
                    values.append(value_cache[block, slot, group].double())
                if seen:
                    weights = [math.exp(logit) for logit in logits]
                    lse[row, head] = math.log(sum(weights))
                    factor = 1.0 if v_scale is None else float(v_scale.expand(kv_heads)[group])
                    out[row, head] = factor * sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return out, lse


@harness.examples(25)
@given(st.data())
def test_the_reference_is_the_formula(data: st.DataObject) -> None:
    call = tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in draw_call(data, "float32", 9))
    out, lse = paged_attention(**named(call))
    want_out, want_lse = by_the_formula(call)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def draw_call(data: st.DataObject, dtype: str, most_rows: int) -> tuple[Any, ...]:
    """A ragged batch with any of the schema's options."""
    lengths = data.draw(st.lists(st.tuples(st.integers(0, most_rows), st.integers(0, 40)), min_size=1, max_size=4))
    kv_heads, group, sizes, page = data.draw(
        st.sampled_from([(1, 4, (8, 8), 1), (2, 3, (24, 8), 3), (2, 1, (16, 20), 64)])
    )
    batch = Batch(
        [rows for rows, _ in lengths],
        [keys for _, keys in lengths],
        heads=(kv_heads * group, kv_heads),
        sizes=sizes,
        page=page,
        dtype=FLOATS[dtype],
        tail=data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 2**31)),
    )
    causal = data.draw(st.booleans())
    positions = None
    if data.draw(st.booleans()):
        rows = sum(batch.query_lens) + batch.tail
        positions = data.draw(st.lists(st.integers(-2, 45), min_size=rows, max_size=rows))
    scales = (torch.tensor([0.7]), torch.arange(1.0, kv_heads + 1)) if data.draw(st.booleans()) else (None, None)
    return batch.arguments(
        causal=causal,
        window=data.draw(st.sampled_from([None, 1, 5, 30])) if causal else None,
        soft_cap=data.draw(st.sampled_from([0.0, 1.5])),
        k_scale=scales[0],
        v_scale=scales[1],
        positions=positions,
    )


# Every provider


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("provider", OWN)
@harness.examples(4 if harness.GPU else 8)
@given(st.data())
def test_any_call(provider: str, dtype: str, data: st.DataObject) -> None:
    check(provider, on_device(draw_call(data, dtype, 30)))


@pytest.mark.parametrize("provider", PROVIDERS)
@harness.examples(4)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=5),
    st.sampled_from([None, 7]),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_ragged_batches_with_heads_of_64(
    provider: str, lengths: list[tuple[int, int]], window: int | None, tail: int, seed: int
) -> None:
    query_lens, key_lens = zip(*lengths, strict=True)
    batch = Batch(query_lens, key_lens, sizes=(64, 64), tail=tail, unseen=unseen(provider), seed=seed)
    check(provider, batch.arguments(window=window))


@pytest.mark.parametrize("page", [1, 16, 48, 128, 784])
@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_pages(provider: str, dtype: str, page: int) -> None:
    if provider == "engine" and page % 16:
        pytest.skip("vLLM's pages hold a multiple of 16 keys")
    batch = Batch([20, 1], [150, 37], sizes=(64, 64), page=page, dtype=FLOATS[dtype], unseen=unseen(provider))
    check(provider, batch.arguments())


@pytest.mark.parametrize("heads", [(8, 1), (16, 2), (3, 3), (6, 2), (20, 1)])
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_groups_of_heads(provider: str, dtype: str, size: int, heads: tuple[int, int]) -> None:
    batch = Batch([9, 1, 2], [40, 33, 5], heads=heads, sizes=(size, size), dtype=FLOATS[dtype], unseen=unseen(provider))
    check(provider, batch.arguments())


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_decode_over_divided_keys(provider: str, dtype: str, rows: int, window: int | None) -> None:
    """Sequences of very different lengths, so that some have fewer divisions with keys than there are."""
    batch = Batch(
        [rows, rows, 0, rows], [700, 130, 9, 0], sizes=(64, 64), tail=2, dtype=FLOATS[dtype], unseen=unseen(provider)
    )
    call = batch.arguments(window=window)
    assert triton_impl._config(call[0], call[1], call[2], 4, rows, 700, window).splits > 1
    check(provider, call)


@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_a_short_chunk_over_divided_keys(provider: str, dtype: str) -> None:
    batch = Batch(
        [40, 2], [1300, 600], heads=(2, 1), sizes=(64, 64), tail=1, dtype=FLOATS[dtype], unseen=unseen(provider)
    )
    call = batch.arguments()
    config = triton_impl._config(call[0], call[1], call[2], 2, 40, 1300, None)
    assert config.splits > 1 and not config.by_sequence
    check(provider, call)


@pytest.mark.parametrize("window", [1, 16, 17, 100])
@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_pages_outside_the_window_may_be_gone(provider: str, dtype: str, window: int) -> None:
    batch = Batch([30, 1, 1], [190, 190, 400], sizes=(64, 64), dtype=FLOATS[dtype], unseen=unseen(provider))
    call = batch.arguments(window=window)
    table, lengths = call[3], call[5]
    for i, rows in enumerate(batch.query_lens):
        free = max(0, int(lengths[i]) - rows - window + 1) // batch.page
        table[i, :free] = call[1].shape[0] - 1
    check(provider, call)


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_soft_cap(provider: str, dtype: str, cap: float) -> None:
    batch = Batch([20, 1], [150, 37], sizes=(64, 64), dtype=FLOATS[dtype], unseen=unseen(provider))
    check(provider, batch.arguments(soft_cap=cap))


@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_not_causal(provider: str, dtype: str) -> None:
    batch = Batch([20, 1, 9], [150, 37, 0], sizes=(64, 64), dtype=FLOATS[dtype], unseen=unseen(provider))
    check(provider, batch.arguments(causal=False))


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("provider", OWN)
def test_an_8_bit_cache(provider: str, rows: int, cache: torch.dtype) -> None:
    batch = Batch([rows, 1], [150, 37], heads=(8, 2), sizes=(64, 32), page=48, cache_dtype=cache)
    check(provider, batch.arguments(k_scale=torch.tensor([0.3, 1.7]), v_scale=torch.tensor(2.0)))


# Positions


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("provider", OWN)
def test_ranks_that_share_a_prompt(provider: str, ranks: int, window: int | None) -> None:
    """Each rank takes two pieces of the chunk, from its front and its back, and pads to equal rows."""
    context, chunk = 37, 60
    whole = Batch([chunk], [context + chunk], sizes=(32, 32)).arguments(window=window)
    run = registry.implementation(PAGED_ATTENTION, provider)
    out, lse = run(*whole)
    piece = -(-chunk // (2 * ranks))
    for rank in range(ranks):
        pieces = (
            range(rank * piece, (rank + 1) * piece),
            range((2 * ranks - 1 - rank) * piece, (2 * ranks - rank) * piece),
        )
        rows = [row if row < chunk else -1 for part in pieces for row in part]
        picked = torch.tensor(rows, device=harness.DEVICE)
        positions = torch.where(picked < 0, -1, picked + context).to(torch.int32)
        starts = torch.tensor([0, len(rows)], dtype=torch.int32, device=harness.DEVICE)
        part = (whole[0][picked], *whole[1:4], starts, whole[5], len(rows), *whole[7:14], positions, True)
        check(provider, part)
        part_out, part_lse = run(*part)
        real = picked >= 0
        torch.testing.assert_close(part_out[real], out[picked[real]], rtol=8e-3, atol=8e-3)
        torch.testing.assert_close(part_lse[real], lse[picked[real]], rtol=1e-4, atol=1e-4)
        assert not part_out[~real].any() and part_lse[~real].isneginf().all()


@pytest.mark.parametrize("provider", OWN)
def test_pages_between_the_windows_of_rows_far_apart_may_be_gone(provider: str) -> None:
    batch = Batch([4], [400], sizes=(32, 32))
    call = batch.arguments(window=20, positions=[60, 61, 380, 381])
    call[3][0, :2] = call[3][0, 5:21] = call[1].shape[0] - 1
    check(provider, call)


# Layouts


@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_strides(provider: str, dtype: str) -> None:
    """Queries inside a wider projection; key and value pages in turns, heads before slots; a slice of a wider table."""
    batch = Batch([20, 1, 3], [150, 37, 3], sizes=(64, 64), dtype=FLOATS[dtype], unseen=unseen(provider))
    call = list(batch.arguments())
    wide = torch.randn(24, 5, 128, device=harness.DEVICE).to(FLOATS[dtype])
    wide[:, :4, 32:96] = call[0]
    call[0] = wide[:, :4, 32:96]
    both = torch.stack([call[1], call[2]], dim=1).transpose(2, 3).contiguous().transpose(2, 3)
    call[1], call[2] = both[:, 0], both[:, 1]
    call[3] = torch.cat([call[3], call[3]], dim=1)[:, : call[3].shape[1]]
    check(provider, tuple(call))


@pytest.mark.parametrize("provider", OWN)
def test_strides_of_every_argument(provider: str) -> None:
    call = list(Batch([20, 1, 3], [150, 37, 3], tail=2, heads=(4, 2)).arguments(
        k_scale=torch.tensor([1.0, 9.0, 0.5, 9.0])[::2], v_scale=torch.tensor([1.0, 9.0, 0.5, 9.0])[::2],
        positions=[*range(10, 30), 36, 0, 1, 2, -1, -1],
    ))  # fmt: skip
    for position in (3, 4, 5, 14):
        call[position] = torch.stack([call[position], call[position] * 0 + 99], dim=-1)[..., 0]
    for position in (0, 1, 2):
        call[position] = call[position].transpose(-1, -2).contiguous().transpose(-1, -2)
    check(provider, tuple(call))


@pytest.mark.parametrize("provider", OWN)
def test_indices_of_64_bits(provider: str) -> None:
    call = list(Batch([20, 1, 3], [150, 37, 3]).arguments(positions=[*range(10, 30), 36, 0, 1, 2]))
    for position in (3, 4, 5, 14):
        call[position] = call[position].long()
    check(provider, tuple(call))


@pytest.mark.skipif(not harness.GPU, reason="touches 6 GiB")
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_more_than_2_to_the_31_elements(provider: str, rows: int) -> None:
    call = Batch([rows] * 4, [40] * 4, sizes=(64, 64), unseen=1.0).arguments()
    wanted = contract.results_of(PAGED_ATTENTION, PAGED_ATTENTION.reference, call)
    far, spread = room_for(3 * 2**30, call[0].dtype), list(call)
    for position, x in enumerate(call[:3]):
        step = far.numel() // x.shape[0] // 1024 * 1024
        assert step * (x.shape[0] - 1) > 2**31
        spread[position] = far.as_strided(x.shape, (step, *x.stride()[1:]), position * 2**16)
        spread[position].copy_(x)
    assert all(torch.equal(x, y) for x, y in zip(call[:3], spread, strict=False)), "they lie across each other"
    assert registry.supports(PAGED_ATTENTION, provider, tuple(spread)).ok
    contract.check(PAGED_ATTENTION, registry.implementation(PAGED_ATTENTION, provider), tuple(spread), wanted)


def room_for(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of which little is touched, or a skip where the GPU has none to spare."""
    free, needed = torch.cuda.mem_get_info()[0], elements * dtype.itemsize
    if free < needed + 2**30:
        pytest.skip(f"{needed >> 30} GiB are needed, {free >> 30} are free")
    return torch.empty(elements, dtype=dtype, device=harness.DEVICE)


# Nothing to do


@pytest.mark.parametrize(("provider", "dtype"), EACH)
@pytest.mark.parametrize(
    ("query_lens", "key_lens", "tail"),
    [
        ([0, 0], [5, 0], 0),
        ([3], [0], 0),
        ([0, 0], [5, 0], 4),
        ([1, 1, 1], [0, 3, 0], 2),
        ([5, 1], [2, 1], 0),
        ([], [], 3),
    ],
)
def test_without_rows_or_keys(provider: str, dtype: str, query_lens: list[int], key_lens: list[int], tail: int) -> None:
    batch = Batch(query_lens, key_lens, sizes=(64, 64), tail=tail, dtype=FLOATS[dtype], unseen=unseen(provider))
    check(provider, batch.arguments())


@pytest.mark.parametrize(("provider", "dtype"), EACH)
def test_without_padding(provider: str, dtype: str) -> None:
    batch = Batch([1, 1, 1], [40, 3, 0], sizes=(64, 64), dtype=FLOATS[dtype], unseen=unseen(provider))
    check(provider, batch.arguments(padded=False))


# As torch and callers see it


@pytest.mark.parametrize("options", [{}, {"positions": [4, 5, 6, 7], "window": 3, "v_scale": torch.ones(2)}])
def test_as_torch_sees_it(options: dict[str, Any]) -> None:
    harness.opcheck(PAGED_ATTENTION, Batch([3, 1], [9, 4]).arguments(**options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale must be above 0"),
        ({"window": 4, "causal": False}, "window needs causal=True"),
        ({"window": 0}, "at least 1 key"),
        ({"k_scale": torch.ones(3)}, "k_scale must hold 1 value or 2"),
        ({"query_positions": torch.zeros(3, dtype=torch.int32)}, r"query_positions must be \[4\]"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, r"cu_seqlens_q \[3\]"),
        ({"q": torch.zeros(4, 5, 16)}, "5 query heads do not divide among 2"),
        ({"q": torch.zeros(4, 4, 8)}, "q .T, HQ, D., key_cache"),
        ({"value_cache": torch.zeros(3, 16, 1, 16)}, "the caches differ"),
    ],
)
def test_what_contradicts_the_schema_is_refused(change: dict[str, Any], message: str) -> None:
    call = Batch([3, 1], [9, 4], dtype=torch.float32).arguments()
    with pytest.raises(ValueError, match=message):
        paged_attention(**(named(call) | change))


def test_what_triton_does_not_serve() -> None:
    call = Batch([3, 1], [9, 4]).arguments()
    assert "float64" in triton_impl.supports_paged_attention(call[0].double(), *call[1:]).reason
    wide = Batch([3, 1], [9, 4], sizes=(264, 264)).arguments()
    assert "at most 256" in triton_impl.supports_paged_attention(*wide).reason
