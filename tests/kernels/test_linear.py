"""The product of few rows: the formula, every provider against the reference, and tiles that programs share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.linear import LINEAR, MOST_ROWS, TOLERANCE, bench, counters, linear, tiles
from atom_patches.kernels.linear.tiles import Row, Tile

PROVIDERS = harness.providers(LINEAR)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

CUTS = {
    "as ever": None,
    "a tile for each program": (Row(1, 64), Tile(64, 64, 1, 2)),
    "uneven parts": (Row(4, 32), Tile(64, 16, 3, 2)),
    "more parts than steps": (Row(16, 128), Tile(16, 128, 4, 3)),
}


def draw(rows: int, outputs: int, inputs: int, dtype: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x and weight are parts of wider tensors full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for count, scale in ((rows, 1.0), (outputs, inputs**-0.5)):
        memory = torch.full((count + 2, inputs + 16), float("nan"), dtype=DTYPES[dtype], device=harness.DEVICE)
        part = memory[1 : count + 1, 8 : inputs + 8]
        found.append(part.copy_(torch.randn(count, inputs, generator=generator) * scale))
    return found[0], found[1], counters(outputs, harness.DEVICE)


@contextlib.contextmanager
def cut(how: str) -> Iterator[None]:
    """Within it, work is cut so, for any shape."""
    asked = CUTS[how]
    if asked is None:
        yield
        return
    with (
        mock.patch.object(tiles, "row", lambda outputs: asked[0]),
        mock.patch.multiple(tiles, LARGE=asked[1], SMALL=asked[1]),
    ):
        yield


def test_the_reference_is_the_formula() -> None:
    x, weight, arrived = draw(3, 5, 7, "bfloat16")
    expected = torch.einsum("mk,nk->mn", x.double(), weight.double())
    torch.testing.assert_close(linear(x, weight, arrived).double(), expected, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(8)
@given(st.sampled_from([0, 1, 2, 7, 16]), st.sampled_from([8, 64, 100, 256]), st.sampled_from([16, 100, 256]))
def test_every_provider(dtype: str, how: str, rows: int, outputs: int, inputs: int) -> None:
    for provider in PROVIDERS:
        with cut(how):
            harness.check(LINEAR, provider, draw(rows, outputs, inputs, dtype), tolerance=TOLERANCE[dtype])


@pytest.mark.skipif("triton" not in PROVIDERS, reason="no Triton")
@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS])
@pytest.mark.parametrize("outputs", [100, 192])
@pytest.mark.parametrize("how", CUTS)
def test_nothing_outside_counts_or_is_written(how: str, outputs: int, rows: int) -> None:
    """Tails of outputs, of inputs and of rows."""
    from atom_patches.kernels.linear import _few_rows, _one_row

    x, weight, arrived = draw(rows, outputs, 200, "bfloat16")
    whole = x.new_full((MOST_ROWS + 1, outputs), 7.0)
    with cut(how):
        if rows == 1:
            _one_row.one_row(x, weight, whole[:1])
        else:
            _few_rows.few_rows(x, weight, arrived, whole[:rows])
    rtol, atol = TOLERANCE["bfloat16"]
    torch.testing.assert_close(whole[:rows], LINEAR.reference(x, weight, arrived), rtol=rtol, atol=atol)
    assert (whole[rows:] == 7.0).all()


@pytest.mark.skipif("triton" not in PROVIDERS, reason="no Triton")
@pytest.mark.parametrize("how", CUTS)
def test_a_second_call_is_the_first_bit_by_bit(how: str) -> None:
    run = registry.implementation(LINEAR, "triton")
    arguments = draw(5, 192, 256, "bfloat16")
    with cut(how):
        first = run(*arguments)
        assert not arguments[2].any(), "counters are zero again"
        assert torch.equal(run(*arguments), first)


@pytest.mark.skipif("triton" not in PROVIDERS, reason="no Triton")
def test_a_row_does_not_depend_on_those_beside_it() -> None:
    """But that one row alone is added up in another order."""
    run = registry.implementation(LINEAR, "triton")
    x, weight, arrived = draw(16, 128, 256, "bfloat16")
    whole = run(x, weight, arrived)
    assert torch.equal(run(x[3:5], weight, arrived), whole[3:5])
    x[4:] = float("nan")
    assert torch.equal(run(x, weight, arrived)[:4], whole[:4])


@pytest.mark.skipif("triton" not in PROVIDERS, reason="no Triton")
def test_what_triton_leaves_to_others() -> None:
    for x, reason in (
        (draw(MOST_ROWS + 1, 8, 16, "bfloat16")[0], "17 rows"),
        (torch.zeros(2, 16, device=harness.DEVICE), "float32"),
        (torch.zeros(16, 2, dtype=torch.bfloat16, device=harness.DEVICE).T, "dense"),
    ):
        verdict = registry.supports(LINEAR, "triton", (x, torch.zeros_like(x), counters(16, harness.DEVICE)))
        assert not verdict.ok and reason in verdict.reason


def test_a_tuned_tile_is_for_its_matrix() -> None:
    for shape, one in tiles.TUNED.items():
        assert tiles.tile(*shape, large=True) is one
        assert tiles.tile(*shape, large=False) is tiles.SMALL, "it has not the memory for it"
    assert tiles.tile(4096, 64, large=True) is tiles.LARGE


def test_every_tile_fits() -> None:
    """Its stages in shared memory, its counters in `arrived`."""
    for one, available in ((tiles.SMALL, 64), *((one, 227) for one in (tiles.LARGE, *tiles.TUNED.values()))):
        assert one.stages * 2 * (one.outputs + MOST_ROWS) * one.depth <= available * 1024, one
        assert counters(1024).numel() >= 1024 // one.outputs


def test_what_was_measured_is_what_the_benchmark_measures() -> None:
    assert set(bench.SHAPES.values()) >= tiles.MEASURED >= tiles.TUNED.keys()
    assert {case.inputs(torch.device("meta"))[0].shape[0] for case in bench.CASES} == {1, MOST_ROWS}


def test_a_measurement_is_of_one_matrix_one_dtype_and_few_rows_or_one() -> None:
    def told(rows: int, outputs: int = 4096, inputs: int = 2048, dtype: torch.dtype = torch.bfloat16) -> str:
        meta = torch.device("meta")
        x, weight = (torch.empty(n, inputs, dtype=dtype, device=meta) for n in (rows, outputs))
        return LINEAR.shape_class(x, weight, counters(outputs, meta))

    assert told(2) == told(MOST_ROWS)
    others = {told(1), told(2), told(MOST_ROWS + 1), told(2, outputs=2048), told(2, inputs=4096)}
    assert len(others | {told(2, dtype=torch.float16)}) == 6
    assert LINEAR.unmeasured[0] == "engine"


def test_as_torch_sees_it() -> None:
    harness.opcheck(LINEAR, draw(3, 40, 32, "bfloat16"))


def test_wrong_arguments_are_named() -> None:
    x, weight, arrived = draw(3, 40, 32, "bfloat16")
    with pytest.raises(ValueError, match=r"weight \[N, K\], got \[3, 31\] and \[40, 32\]"):
        linear(x[:, 1:], weight, arrived)
    with pytest.raises(ValueError, match="one dtype"):
        linear(x.half(), weight, arrived)
    with pytest.raises(ValueError, match=r"counters\(40\)"):
        linear(x, weight, arrived[:2])
