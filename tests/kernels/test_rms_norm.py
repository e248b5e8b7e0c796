"""Root-mean-square normalisation: the formula in float64, and every provider against the reference."""

from __future__ import annotations

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.kernels.rms_norm import RMS_NORM, TOLERANCE, rms_norm

PROVIDERS = harness.providers(RMS_NORM)
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
@given(st.integers(0, 5), st.integers(1, 300), st.booleans())
def test_every_provider(provider: str, dtype: str, rows: int, size: int, gemma: bool) -> None:
    x, weight = draw((rows,), size, dtype)
    harness.check(RMS_NORM, provider, (x, weight, 1e-6, gemma), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_of_a_wider_tensor(provider: str) -> None:
    x, weight = draw((3, 4), 40, "bfloat16")
    harness.check(RMS_NORM, provider, (x[:, ::2, 3:35], weight[:32], 1e-6, True), tolerance=TOLERANCE["bfloat16"])


def test_as_torch_sees_it() -> None:
    x, weight = draw((3,), 8, "bfloat16")
    harness.opcheck(RMS_NORM, (x.mT.contiguous().mT, weight, 1e-6, True))


def test_a_weight_of_another_size_is_refused() -> None:
    x, weight = draw((3,), 8, "float32")
    with pytest.raises(ValueError, match=r"weight must be \[8\], got \[7\]"):
        rms_norm(x, weight[:7])
