"""Gating and L2 normalisation against their float64 formulas."""

from __future__ import annotations

import harness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_patches.kernels import gdn_gating as gating_op
from atom_patches.kernels import l2norm as l2norm_op
from atom_patches.kernels import registry
from atom_patches.kernels.gdn_gating import GDN_GATING
from atom_patches.kernels.l2norm import L2NORM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
L2NORM_PROVIDERS, GATING_PROVIDERS = harness.providers(L2NORM), harness.providers(GDN_GATING)
OURS = ("torch", "triton")


def served(operation: registry.Operation, provider: str, arguments: tuple[object, ...]) -> bool:
    """Ours serve everything; another may refuse."""
    return provider in OURS or registry.supports(operation, provider, arguments).ok


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 6),
    heads=st.integers(1, 5),
    size=st.sampled_from([0.1, 1.0, 30.0, 200.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_gating(rows: int, heads: int, size: float, dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    a = (size * torch.randn(rows, 2 * heads, generator=gen)).to(dtype)[:, ::2]
    b = torch.randn(heads, rows, generator=gen).to(dtype).T
    log, bias = torch.randn(heads, generator=gen), torch.randn(heads, generator=gen).to(dtype)
    g, beta = gating_op.gdn_gating(a, b, log, bias)
    x = a.double() + bias.double()
    want_g = -log.double().exp() * torch.logaddexp(x, torch.zeros_like(x))
    want_beta = 1 / (1 + (-b.double()).exp())
    rtol, atol = gating_op.TOLERANCE["float32"]
    assert g.dtype == beta.dtype == torch.float32
    torch.testing.assert_close(g.double(), want_g, rtol=rtol, atol=atol)
    torch.testing.assert_close(beta.double(), want_beta, rtol=rtol, atol=atol)
    assert (g <= 0).all()


def test_gating_widens_before_it_exponentiates() -> None:
    zero = torch.zeros(1, 1, dtype=torch.float16)
    g, _ = gating_op.gdn_gating(zero, zero, torch.tensor([12.0], dtype=torch.float16), zero[0])
    assert g.item() == pytest.approx(-(2.718281828**12) * 0.6931472, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=2),
    width=st.integers(1, 9),
    size=st.sampled_from([1e-6, 1e-3, 1.0, 100.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_l2norm(shape: list[int], width: int, size: float, dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = (size * torch.randn(*shape, 2 * width, generator=gen)).to(dtype)[..., ::2]
    want = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    got = l2norm_op.l2norm(x)
    rtol, atol = l2norm_op.TOLERANCE[str(dtype).removeprefix("torch.")]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("provider", [name for name in L2NORM_PROVIDERS if name in OURS])
def test_a_row_of_zeros_stays_zeros(provider: str) -> None:
    assert not registry.implementation(L2NORM, provider)(torch.zeros(2, 3, device=harness.DEVICE), 1e-6).any()


@pytest.mark.parametrize("provider", L2NORM_PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(6)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    width=st.sampled_from([1, 3, 16, 65, 128, 300]),
    step=st.integers(1, 2),
)
def test_l2norm_by_every_provider(provider: str, dtype: str, shape: list[int], width: int, step: int) -> None:
    gen = torch.Generator().manual_seed(width)
    x = torch.randn(*shape, step * width, generator=gen).to(harness.DEVICE, DTYPES[dtype])[..., ::step]
    if served(L2NORM, provider, (x, 1e-6)):
        harness.check(L2NORM, provider, (x, 1e-6), tolerance=l2norm_op.TOLERANCE[dtype])


@pytest.mark.parametrize("provider", L2NORM_PROVIDERS)
@pytest.mark.parametrize("tokens", [3, 130])
def test_l2norm_of_heads_inside_a_projection(provider: str, tokens: int) -> None:
    x = torch.randn(tokens, 96, device=harness.DEVICE)[:, 8:72].unflatten(1, (4, 16))
    if served(L2NORM, provider, (x, 1e-6)):
        harness.check(L2NORM, provider, (x, 1e-6), tolerance=l2norm_op.TOLERANCE["float32"])


def test_l2norm_as_torch_sees_it() -> None:
    harness.opcheck(L2NORM, (torch.randn(3, 4, 6, device=harness.DEVICE).mT, 1e-6))


@pytest.mark.parametrize("provider", GATING_PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(6)
@given(tokens=st.integers(0, 70), heads=st.sampled_from([1, 5, 32, 40]), size=st.sampled_from([1.0, 30.0, 300.0]))
def test_gating_by_every_provider(provider: str, dtype: str, tokens: int, heads: int, size: float) -> None:
    gen = torch.Generator().manual_seed(heads)
    a = (size * torch.randn(tokens, 2 * heads, generator=gen)).to(harness.DEVICE, DTYPES[dtype])[:, ::2]
    b = torch.randn(heads, tokens, generator=gen).to(harness.DEVICE, DTYPES[dtype]).T
    weights = torch.randn(2, heads, 2, generator=gen).to(harness.DEVICE)
    arguments = (a, b, weights[0, :, 0], weights[1, :, 1].to(DTYPES[dtype]))
    if served(GDN_GATING, provider, arguments):
        harness.check(GDN_GATING, provider, arguments, tolerance=gating_op.TOLERANCE["float32"])


@pytest.mark.parametrize("provider", GATING_PROVIDERS)
def test_gating_of_dense_float32(provider: str) -> None:
    a, b = torch.randn(2, 5, 8, device=harness.DEVICE)
    log, bias = torch.randn(2, 8, device=harness.DEVICE)
    harness.check(GDN_GATING, provider, (a, b, log, bias), tolerance=gating_op.TOLERANCE["float32"])


@pytest.mark.parametrize("provider", [name for name in GATING_PROVIDERS if name in OURS])
def test_a_weak_decay_keeps_its_digits(provider: str) -> None:
    a = torch.tensor([[-12.0, -20.0, -60.0]], device=harness.DEVICE)
    zeros = torch.zeros(3, device=harness.DEVICE)
    g, _ = registry.implementation(GDN_GATING, provider)(a, a, zeros, zeros)
    torch.testing.assert_close(g, -a.exp(), rtol=1e-4, atol=0)


def test_gating_as_torch_sees_it() -> None:
    a, b = torch.randn(2, 8, 5, device=harness.DEVICE).mT
    log, bias = torch.randn(2, 8, device=harness.DEVICE)
    harness.opcheck(GDN_GATING, (a, b, log, bias))


@pytest.mark.parametrize("wrong", range(4))
def test_gating_of_other_shapes_is_refused(wrong: int) -> None:
    arguments = [torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(4), torch.zeros(4)]
    arguments[wrong] = arguments[wrong][..., :3]
    with pytest.raises(ValueError, match=r"a and b must be one \[T, HV\]"):
        gating_op.gdn_gating(*arguments)
