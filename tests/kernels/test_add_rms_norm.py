"""Residual addition with normalisation: the formula in float64, and every provider against the reference."""

from __future__ import annotations

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.add_rms_norm import ADD_RMS_NORM, TOLERANCE, add_rms_norm

PROVIDERS = harness.providers(ADD_RMS_NORM)
OURS = [name for name in PROVIDERS if name in ("torch", "triton")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def draw(rows: tuple[int, ...], size: int, dtype: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(*rows, size, generator=generator) * 3, torch.randn(*rows, size, generator=generator)
    weight = torch.randn(size, generator=generator)
    return tuple(t.to(harness.DEVICE, DTYPES[dtype]) for t in (x, residual, weight))  # type: ignore[return-value]


@pytest.mark.parametrize("gemma", [False, True])
def test_the_reference_is_the_formula(gemma: bool) -> None:
    x, residual, weight = draw((5,), 12, "float32")
    y, total = add_rms_norm(x, residual, weight, 1e-3, gemma=gemma)
    wide = x.double() + residual.double()
    expected = wide / (wide.pow(2).sum(-1, keepdim=True) / 12 + 1e-3).sqrt() * (weight.double() + (1 if gemma else 0))
    torch.testing.assert_close(total.double(), wide, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("provider", OURS)
def test_the_norm_is_that_of_the_rounded_sum(provider: str) -> None:
    x = torch.full((1, 4), 256.0, dtype=torch.bfloat16, device=harness.DEVICE)
    small = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16, device=harness.DEVICE)
    weight = torch.full((4,), 1.0035, device=harness.DEVICE)
    y, total = registry.implementation(ADD_RMS_NORM, provider)(x, small, weight, 0.0, False)
    assert torch.equal(total, x), "257 rounds to 256 in bfloat16"
    assert torch.equal(y, torch.ones_like(y)), "257 / 256.25 * 1.0035 would round up"


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(6)
@given(st.integers(0, 5), st.sampled_from([1, 3, 16, 65, 128, 300]), st.booleans())
def test_every_provider(provider: str, dtype: str, rows: int, size: int, gemma: bool) -> None:
    arguments = (*draw((rows,), size, dtype), 1e-6, gemma)
    harness.check(ADD_RMS_NORM, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", OURS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (8,), (2, 3, 2, 8)])
def test_shapes_without_rows_and_of_other_ranks(provider: str, shape: tuple[int, ...]) -> None:
    arguments = (*draw(shape[:-1], shape[-1], "float32"), 1e-6, False)
    harness.check(ADD_RMS_NORM, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rows", [512, 513, 700])
def test_many_rows_share_programs(provider: str, rows: int) -> None:
    arguments = (*draw((rows,), 16, "float32"), 1e-6, False)
    harness.check(ADD_RMS_NORM, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_of_wider_tensors(provider: str) -> None:
    x, residual, weight = draw((5,), 64, "bfloat16")
    arguments = (x[1:, 8:40], residual[:4, :32], weight[:32], 1e-6, False)
    harness.check(ADD_RMS_NORM, provider, arguments, tolerance=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("provider", OURS)
@pytest.mark.parametrize("swapped", [False, True])
def test_three_dimensions_of_which_one_input_is_strided(provider: str, swapped: bool) -> None:
    x, residual, weight = draw((3, 4), 16, "float32")
    wide = torch.full((3, 9, 20), float("nan"), device=harness.DEVICE)
    part = wide[:, 2:6, 1:17]
    part.copy_(x)
    pair = (residual, part) if swapped else (part, residual)
    harness.check(ADD_RMS_NORM, provider, (*pair, weight, 1e-6, True), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", OURS)
def test_columns_at_a_stride(provider: str) -> None:
    x, residual, weight = draw((6,), 6, "float32")
    arguments = (x.T, residual, weight.repeat(2)[::2], 1e-6, False)
    harness.check(ADD_RMS_NORM, provider, arguments, tolerance=TOLERANCE["float32"])


def test_as_torch_sees_it() -> None:
    x, residual, weight = draw((3,), 8, "bfloat16")
    harness.opcheck(ADD_RMS_NORM, (x.mT.contiguous().mT, residual, weight, 1e-6, True))


def test_wrong_arguments_are_named() -> None:
    x, residual, weight = draw((3,), 8, "float32")
    with pytest.raises(ValueError, match="residual must be"):
        add_rms_norm(x, residual[:2], weight)
    with pytest.raises(ValueError, match="residual must be"):
        add_rms_norm(x, residual.half(), weight)
    with pytest.raises(ValueError, match=r"weight must be \[8\], got \[7\]"):
        add_rms_norm(x, residual, weight[:7])
