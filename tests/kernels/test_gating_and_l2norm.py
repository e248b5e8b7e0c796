"""Gating and L2 normalisation against their float64 formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_patches.kernels import gdn_gating as gating_op
from atom_patches.kernels import l2norm as l2norm_op


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


def test_a_row_of_zeros_stays_zeros() -> None:
    assert not l2norm_op.l2norm(torch.zeros(2, 3)).any()
