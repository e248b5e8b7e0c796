"""Root-mean-square normalisation: the formula in float64, and every provider against the reference."""

from __future__ import annotations

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.kernels import registry
from atom_patches.kernels.rms_norm import RMS_NORM, TOLERANCE, rms_norm

PROVIDERS = harness.providers(RMS_NORM)
OURS = [name for name in PROVIDERS if name in ("torch", "triton")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def draw(rows: tuple[int, ...], size: int, dtype: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*rows, size, generator=generator) * 3
    weight = torch.randn(size, generator=generator)
    return x.to(harness.DEVICE, DTYPES[dtype]), weight.to(harness.DEVICE, DTYPES[dtype])


@pytest.mark.parametrize("gemma", [False, True])
def test_the_reference_is_the_formula(gemma: bool) -> None:
    x, weight = draw((5,), 12, "float32")
    wide = x.double()
    factor = weight.double() + (1 if gemma else 0)
    expected = wide / (wide.pow(2).sum(-1, keepdim=True) / 12 + 1e-3).sqrt() * factor
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, gemma=gemma).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(6)
@given(st.integers(0, 5), st.sampled_from([1, 3, 16, 65, 128, 300]), st.booleans())
def test_every_provider(provider: str, dtype: str, rows: int, size: int, gemma: bool) -> None:
    x, weight = draw((rows,), size, dtype)
    harness.check(RMS_NORM, provider, (x, weight, 1e-6, gemma), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", OURS)
@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (3, 0, 8), (8,), (2, 3, 2, 8)])
def test_shapes_without_rows_and_of_other_ranks(provider: str, shape: tuple[int, ...]) -> None:
    x, weight = draw(shape[:-1], shape[-1], "float32")
    harness.check(RMS_NORM, provider, (x, weight, 1e-6, False), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rows", [511, 512, 513, 700])
def test_many_rows_share_programs(provider: str, rows: int) -> None:
    x, weight = draw((rows,), 16, "float32")
    harness.check(RMS_NORM, provider, (x, weight, 1e-6, False), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_hidden_size_of_a_served_model(provider: str) -> None:
    x, weight = draw((2,), 2048, "bfloat16")
    harness.check(RMS_NORM, provider, (x, weight, 1e-6, False), tolerance=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_heads_of_a_wider_row(provider: str) -> None:
    x, weight = draw((3, 4), 40, "bfloat16")
    harness.check(RMS_NORM, provider, (x[:, 1:3, 3:35], weight[:32], 1e-6, True), tolerance=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("provider", OURS)
def test_columns_and_weights_at_a_stride(provider: str) -> None:
    x, weight = draw((6,), 40, "float32")
    harness.check(RMS_NORM, provider, (x.T, weight[:12:2], 1e-6, True), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", OURS)
def test_a_weight_of_another_dtype(provider: str) -> None:
    x, weight = draw((3,), 24, "bfloat16")
    harness.check(RMS_NORM, provider, (x, weight.float(), 1e-6, True), tolerance=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("provider", OURS)
def test_rows_of_zeros_stay_zeros(provider: str) -> None:
    x, weight = draw((3,), 24, "bfloat16")
    x[1] = 0
    assert not registry.implementation(RMS_NORM, provider)(x, weight, 1e-6, False)[1].any()


@pytest.mark.parametrize("provider", OURS)
def test_rows_more_than_two_billion_values_apart(provider: str) -> None:
    stride, size = 2**29 + 64, 64  # an int32, which four times itself is not
    memory = torch.empty(4 * stride + size, dtype=torch.bfloat16, device=harness.DEVICE)  # untouched: not resident
    x = memory.as_strided((5, size), (stride, 1))
    values, weight = draw((5,), size, "bfloat16")
    x.copy_(values)
    found = registry.implementation(RMS_NORM, provider)(x, weight, 1e-6, False)
    torch.testing.assert_close(found, rms_norm(values, weight), rtol=8e-3, atol=1e-3)


def test_as_torch_sees_it() -> None:
    x, weight = draw((3,), 8, "bfloat16")
    harness.opcheck(RMS_NORM, (x.mT.contiguous().mT, weight, 1e-6, True))


def test_a_weight_of_another_size_is_refused() -> None:
    x, weight = draw((3,), 8, "float32")
    with pytest.raises(ValueError, match=r"weight must be \[8\], got \[7\]"):
        rms_norm(x, weight[:7])


def test_rows_too_long_for_registers_are_refused_by_name() -> None:
    x, weight = torch.zeros(1, 16385, device=harness.DEVICE), torch.zeros(16385, device=harness.DEVICE)
    verdict = registry.supports(RMS_NORM, "triton", (x, weight, 1e-6, False))
    assert not verdict.ok and "16385" in verdict.reason
