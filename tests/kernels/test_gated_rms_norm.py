"""GatedDeltaNet's output norm: the formula in float64, and every provider against the reference."""

from __future__ import annotations

import math

import harness
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.gated_rms_norm import ACTIVATIONS, GATED_RMS_NORM, TOLERANCE, gated_rms_norm

PROVIDERS = harness.providers(GATED_RMS_NORM)
OURS = [name for name in PROVIDERS if name in ("torch", "triton")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def draw(tokens: int, heads: int, size: int, dtype: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, gate = (3 * torch.randn(tokens, heads, size, generator=generator) for _ in range(2))
    weight = torch.randn(size, generator=generator)
    return tuple(t.to(harness.DEVICE, DTYPES[dtype]) for t in (x, gate, weight))  # type: ignore[return-value]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_the_formula(activation: str) -> None:
    x, gate, weight = draw(2, 3, 5, "float32")
    y = gated_rms_norm(x, gate, weight, 1e-3, activation=activation)
    for t in range(2):
        for h in range(3):
            root = math.sqrt(sum(float(v) ** 2 for v in x[t, h]) / 5 + 1e-3)
            for d in range(5):
                z = float(gate[t, h, d])
                opened = (z if activation == "silu" else 1.0) / (1 + math.exp(-z))
                assert float(y[t, h, d]) == pytest.approx(
                    float(x[t, h, d]) / root * float(weight[d]) * opened, rel=1e-5
                )


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(6)
@given(st.integers(0, 4), st.integers(1, 4), st.sampled_from([1, 6, 16, 65, 128]), st.sampled_from(ACTIVATIONS))
def test_every_provider(provider: str, dtype: str, tokens: int, heads: int, size: int, activation: str) -> None:
    arguments = (*draw(tokens, heads, size, dtype), 1e-6, activation)
    assume(provider != "engine" or registry.supports(GATED_RMS_NORM, provider, arguments).ok)
    harness.check(GATED_RMS_NORM, provider, arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", OURS)
@pytest.mark.parametrize("shape", [(0, 2, 8), (2, 0, 8)])
def test_no_heads(provider: str, shape: tuple[int, int, int]) -> None:
    harness.check(GATED_RMS_NORM, provider, (*draw(*shape, "float32"), 1e-6, "silu"), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("tokens", [128, 129, 175])
def test_many_heads_share_programs(provider: str, tokens: int) -> None:
    arguments = (*draw(tokens, 4, 16, "float32"), 1e-6, "silu")
    harness.check(GATED_RMS_NORM, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("tokens", [3, 140])
def test_a_gate_inside_a_projection(provider: str, tokens: int) -> None:
    x, gate, weight = draw(tokens, 4, 16, "bfloat16")
    projected = torch.full((tokens, 24 + 64 + 8), float("nan"), dtype=torch.bfloat16, device=harness.DEVICE)
    part = projected[:, 24:88].unflatten(1, (4, 16))
    part.copy_(gate)
    arguments = (x, part, weight, 1e-6, "silu")
    harness.check(GATED_RMS_NORM, provider, arguments, tolerance=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("provider", OURS)
def test_strides_and_dtypes_of_their_own(provider: str) -> None:
    x, gate, weight = draw(4, 3, 6, "float32")
    arguments = (x.permute(1, 2, 0), gate.to(torch.float16).permute(1, 2, 0), weight[:4].bfloat16(), 1e-6, "sigmoid")
    harness.check(GATED_RMS_NORM, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("provider", OURS)
def test_large_gates_neither_overflow_nor_leak(provider: str) -> None:
    x, gate, weight = draw(2, 2, 8, "float32")
    gate[0], gate[1] = -1e4, 1e4
    y = registry.implementation(GATED_RMS_NORM, provider)(x, gate, weight, 1e-6, "sigmoid")
    assert not y[0].any()
    torch.testing.assert_close(y[1], gated_rms_norm(x, gate, weight, activation="sigmoid")[1], rtol=1e-5, atol=1e-6)


def test_as_torch_sees_it() -> None:
    x, gate, weight = draw(3, 2, 8, "bfloat16")
    harness.opcheck(GATED_RMS_NORM, (x.mT.contiguous().mT, gate, weight, 1e-6, "silu"))


def test_wrong_arguments_are_named() -> None:
    x, gate, weight = draw(3, 2, 8, "float32")
    with pytest.raises(ValueError, match="x and gate must be one"):
        gated_rms_norm(x, gate[:, :1], weight)
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        gated_rms_norm(x, gate, weight[:7])
    with pytest.raises(ValueError, match="activation must be one of silu, sigmoid, got 'gelu'"):
        gated_rms_norm(x, gate, weight, activation="gelu")
