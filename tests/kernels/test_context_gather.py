"""Rows by plan: copies are exact, whatever the tensors are, and a plan's exchange restores the step's rows."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import contract, registry
from atom_patches.kernels.context_gather import (
    GATHER_ROWS,
    PACK_ROWS,
    SCATTER_ROWS,
    gather_rows,
    pack_rows,
    scatter_rows,
)
from atom_patches.kernels.registry import Operation
from atom_patches.runtime.pcp import PcpPlan

PROVIDERS = harness.providers(GATHER_ROWS)
BITS = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64)
SHAPES = ((), (3,), (2, 5), (1500,), (4, 0))
"""Shapes of one row: also wider than a program's columns, and empty."""


def draw(rows: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random values of an 8-bit integer's range; NaN among them where the dtype has it."""
    values = torch.randint(-100, 100, (rows, *shape), generator=torch.Generator().manual_seed(seed))
    found = values.to(torch.float32).masked_fill(values == 7, float("nan")) if dtype.is_floating_point else values
    return found.to(dtype).to(harness.DEVICE)


def check(operation: Operation, provider: str, *call: Any) -> None:
    harness.check(operation, provider, call, tolerance=(0.0, 0.0))


def indices(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=harness.DEVICE)


@st.composite
def tensors(draw_from: st.DrawFn, rows: int, one_dtype: bool) -> list[Tensor]:
    count = draw_from(st.integers(1, 5))
    first = draw_from(st.sampled_from(BITS))
    dtypes = [first if one_dtype else draw_from(st.sampled_from(BITS)) for _ in range(count)]
    return [draw(rows, draw_from(st.sampled_from(SHAPES)), dtype, seed) for seed, dtype in enumerate(dtypes)]


# The reference, row by row


def test_the_reference_is_the_definition() -> None:
    x, y = draw(4, (2, 3), torch.float32), draw(4, (), torch.int64)
    more = [draw(2, (2, 3), torch.float32, 1), draw(2, (), torch.int64, 1)]
    index = [3, -1, 0, 5, 3, -7, 4]
    for source, extra, out in zip((x, y), more, gather_rows([x, y], indices(index), more=more), strict=True):
        assert out.shape == (7, *source.shape[1:]) and out.dtype == source.dtype
        for row, at in enumerate(index):
            want = torch.zeros_like(source[0]) if at < 0 else source[at] if at < 4 else extra[at - 4]
            torch.testing.assert_close(out[row], want, rtol=0, atol=0, equal_nan=True)
    packed = pack_rows([x, x[:, 0, 0]], indices([2, -1]))
    torch.testing.assert_close(packed[0], torch.cat([x[2].flatten(), x[2, 0, :1]]), rtol=0, atol=0, equal_nan=True)
    assert packed.shape == (2, 7) and not packed[1].any()
    (out,) = scatter_rows([x], indices([5, -1, 0, 2]), 7)
    for row, at in ((5, 0), (0, 2), (2, 3)):
        torch.testing.assert_close(out[row], x[at], rtol=0, atol=0, equal_nan=True)
    assert out.shape == (7, 2, 3) and not out[[1, 3, 4, 6]].any()


# Every provider


@pytest.mark.parametrize("provider", PROVIDERS)
@harness.examples(15)
@given(st.data())
def test_gather(provider: str, data: st.DataObject) -> None:
    rows, extra = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([0, 0, 1, 4]))
    xs = data.draw(tensors(rows, one_dtype=False))
    more = [draw(extra, tuple(x.shape[1:]), x.dtype, 9) for x in xs] if extra else []
    index = data.draw(st.lists(st.integers(-2, rows + extra - 1), max_size=9))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    check(GATHER_ROWS, provider, xs, more, indices(index, kind), True)


@pytest.mark.parametrize("provider", PROVIDERS)
@harness.examples(10)
@given(st.data())
def test_pack(provider: str, data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 6))
    xs = data.draw(tensors(rows, one_dtype=True))
    index = data.draw(st.lists(st.integers(-2, rows - 1), max_size=9))
    check(PACK_ROWS, provider, xs, indices(index), True)


@pytest.mark.parametrize("provider", PROVIDERS)
@harness.examples(10)
@given(st.data())
def test_scatter(provider: str, data: st.DataObject) -> None:
    rows, spare = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3))
    xs = data.draw(tensors(rows, one_dtype=False))
    order = data.draw(st.permutations(range(rows + spare)))[:rows]
    index = [-1 if data.draw(st.booleans()) else at for at in order]
    check(SCATTER_ROWS, provider, xs, indices(index), rows + spare, True)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_without_padding(provider: str) -> None:
    xs, index = [draw(5, (2, 40), torch.bfloat16), draw(5, (3,), torch.float32)], indices([4, 0, 0, 2])
    check(GATHER_ROWS, provider, xs, [], index, False)
    check(GATHER_ROWS, provider, xs, xs, indices([9, 0, 5]), False)
    check(PACK_ROWS, provider, xs[:1], index, False)
    check(SCATTER_ROWS, provider, xs, indices([4, 0, 6, 2, 1]), 7, False)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_many_rows_and_columns(provider: str) -> None:
    """More of both than one program copies, and a last program of each that is not full."""
    xs = [draw(70, (1100,), torch.bfloat16), draw(70, (3, 7), torch.bfloat16), draw(70, (), torch.bfloat16)]
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0)).to(harness.DEVICE)
    check(GATHER_ROWS, provider, xs, [], order, True)
    check(PACK_ROWS, provider, xs, order, True)
    check(SCATTER_ROWS, provider, xs, order, 75, True)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_strides(provider: str) -> None:
    """Parts of a wider projection, every second column, transposed heads, and every second index."""
    wide = draw(6, (64,), torch.bfloat16)
    heads = draw(4, (6, 3), torch.bfloat16).transpose(0, 1)
    xs = [wide[:, 8:24].unflatten(1, (2, 8)), wide[:, 1::2], heads]
    more = [x.flip(0) for x in xs]
    index = indices([5, 99, -1, 99, 0, 99, 3, 99])[::2]
    check(GATHER_ROWS, provider, xs, [], index, True)
    check(GATHER_ROWS, provider, xs, more, index + 4, True)
    check(PACK_ROWS, provider, xs, index, True)
    check(SCATTER_ROWS, provider, [x[:4] for x in xs], index, 6, True)


@pytest.mark.skipif(not harness.GPU, reason="touches 4 GiB")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_more_than_2_to_the_31_elements(provider: str) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < 5 * 2**30:
        pytest.skip(f"4 GiB are needed, {free >> 30} are free")
    x = draw(5, (300,), torch.int16)
    far = torch.empty(2**31 + 2**20, dtype=torch.int16, device=harness.DEVICE)
    spread = far.as_strided((5, 300), (2**29 + 1, 1)).copy_(x)
    if provider != "engine":  # vLLM's way to join two sources copies both
        check_spread(GATHER_ROWS, provider, ([x], [x], indices([4, -1, 8, 3, 9]), True), spread)
    check_spread(GATHER_ROWS, provider, ([x], [], indices([4, -1, 3]), True), spread)
    check_spread(SCATTER_ROWS, provider, ([x], indices([4, -1, 0, 3, 1]), 5, True), spread)


def check_spread(operation: Operation, provider: str, call: tuple[Any, ...], spread: Tensor) -> None:
    """Like `check`, with `spread` in place of every tensor that is a row source, and without a copy of it."""
    wanted = contract.results_of(operation, operation.reference, call)
    far = tuple([spread for _ in part] if isinstance(part, list) else part for part in call)
    contract.check(operation, registry.implementation(operation, provider), far, wanted)


# What it is for


@pytest.mark.parametrize("query_lens", [(9, 1, 4), (1, 1, 30), (7,), (5, 6, 1, 8)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_plan_s_exchange_restores_the_rows_of_the_step(
    provider: str, ranks: int, query_lens: tuple[int, ...]
) -> None:
    """Each rank packs its slice of keys and values, with padding; from all of them come the rows in global order."""
    gather, pack = (registry.implementation(operation, provider) for operation in (GATHER_ROWS, PACK_ROWS))
    plan = PcpPlan(ranks, query_lens)
    keys = torch.randn(plan.num_tokens, 2, 8, device=harness.DEVICE)
    values = torch.randn(plan.num_tokens, 2, 6, device=harness.DEVICE)
    sent = []
    for rank in range(ranks):
        local = plan.local_rows(rank).to(harness.DEVICE)
        own = gather([keys, values], [], local, False)
        replicated = len(plan.replicated)
        send = torch.arange(replicated, plan.rows_per_rank, device=harness.DEVICE)
        send[len(send) - plan.padding(rank) :] = -1
        sent.append(pack(own, send, True))
    received = torch.cat(sent)
    index = torch.empty(plan.num_tokens, dtype=torch.int64)
    index[plan.pool_rows()] = torch.arange(plan.pool_size)
    index[plan.replicated_rows()] = received.shape[0] + torch.arange(len(plan.replicated))
    views = [received[:, :16].unflatten(1, (2, 8)), received[:, 16:].unflatten(1, (2, 6))]
    whole = gather(views, own, index.to(harness.DEVICE), False)
    assert torch.equal(whole[0], keys) and torch.equal(whole[1], values)


# As torch and callers see it


def test_as_torch_sees_it() -> None:
    xs = [torch.randn(4, 2, 3, device=harness.DEVICE), torch.randn(4, 5, device=harness.DEVICE)]
    index = indices([3, -1, 0, 2])
    harness.opcheck(GATHER_ROWS, (xs, [], index, True))
    harness.opcheck(GATHER_ROWS, (xs, xs, index, True))
    harness.opcheck(PACK_ROWS, (xs, index, True))
    harness.opcheck(SCATTER_ROWS, (xs, index, 6, True))


def test_what_contradicts_the_schema_is_refused() -> None:
    x, index = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one tensor"):
        gather_rows([], index)
    with pytest.raises(ValueError, match="the same number of rows"):
        gather_rows([x, x[:2]], index)
    with pytest.raises(ValueError, match="index must be"):
        gather_rows([x], index.short())
    with pytest.raises(ValueError, match="more must be like xs"):
        gather_rows([x], index, more=[x.double()])
    with pytest.raises(ValueError, match="one buffer holds one dtype"):
        pack_rows([x, x.double()], index)
    with pytest.raises(ValueError, match="4 rows need as many indices, got 2"):
        scatter_rows([x], index[:2], 9)
