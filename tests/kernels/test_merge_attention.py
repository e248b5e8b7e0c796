"""Merging partial attention: the formula in float64, and every provider against the reference."""

from __future__ import annotations

import math

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import contract, registry
from atom_patches.kernels.merge_attention import (
    MERGE_ATTENTION,
    MERGE_ATTENTION_PARTS,
    TOLERANCE,
    merge_attention,
    merge_attention_parts,
    triton_impl,
)
from atom_patches.kernels.paged_attention import PAGED_ATTENTION

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TWO = harness.providers(MERGE_ATTENTION)
PARTS = harness.providers(MERGE_ATTENTION_PARTS)
OWN = [provider for provider in PARTS if provider in ("torch", "triton")]
"""Those that serve all that the schema admits."""

EMPTY = (-math.inf, math.inf)


def draw(
    parts: int, rows: int, heads: int, size: int, dtype: str, seed: int = 0, empty: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Parts [P, T, H, D] and their lses [P, T, H], head-major; about a share `empty` of them without keys, so 0."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, rows, heads, size, generator=generator)
    lses = torch.randn(parts, heads, rows, generator=generator).mT * 10
    kind = torch.rand(lses.shape, generator=generator)
    for i, mark in enumerate(EMPTY):
        chosen = (kind >= i * empty / 2) & (kind < (i + 1) * empty / 2)
        lses[chosen], outs[chosen] = mark, 0.0
    return outs.to(harness.DEVICE, FLOATS[dtype]), lses.to(harness.DEVICE)


def check_two(provider: str, outs: Tensor, lses: Tensor) -> None:
    call = (outs[0], lses[0], outs[1], lses[1])
    harness.check(MERGE_ATTENTION, provider, call, tolerance=TOLERANCE[registry.dtype_name(outs.dtype)])


def check_parts(provider: str, outs: Tensor, lses: Tensor) -> None:
    tolerance = TOLERANCE[registry.dtype_name(outs.dtype)]
    harness.check(MERGE_ATTENTION_PARTS, provider, (outs, lses), tolerance=tolerance)


def test_the_reference_is_the_formula() -> None:
    outs, lses = (x.cpu() for x in draw(3, 7, 2, 5, "float32", empty=0.6))
    out, lse = merge_attention_parts(outs, lses)
    for row in range(7):
        for head in range(2):
            found = [p for p in range(3) if math.isfinite(lses[p, row, head])]
            weights = [math.exp(float(lses[p, row, head])) for p in found]
            want = torch.zeros(5, dtype=torch.float64)
            for weight, part in zip(weights, found, strict=True):
                want += weight * outs[part, row, head].double()
            total = math.log(sum(weights)) if found else -math.inf
            torch.testing.assert_close(out[row, head].double(), want / max(sum(weights), 1e-300), rtol=1e-5, atol=1e-6)
            assert float(lse[row, head]) == pytest.approx(total, rel=1e-5)
    assert (lses.isinf().all(0)).any() and not lses.isinf().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("provider", TWO)
@harness.examples(6)
@given(
    st.integers(0, 9), st.integers(1, 5), st.sampled_from([8, 72, 256]), st.sampled_from([0, 10**9]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_two_parts(provider: str, dtype: str, rows: int, heads: int, size: int, few: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_impl, "FEW_PAIRS", few)
        check_two(provider, *draw(2, rows, heads, size, dtype, seed))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("provider", PARTS)
@harness.examples(6)
@given(st.integers(1, 20), st.integers(0, 4), st.integers(1, 3), st.sampled_from([8, 72, 512]), st.integers(0, 2**31))
def test_many_parts(provider: str, dtype: str, parts: int, rows: int, heads: int, size: int, seed: int) -> None:
    check_parts(provider, *draw(parts, rows, heads, size, dtype, seed))


@pytest.mark.parametrize("provider", PARTS)
@pytest.mark.parametrize("parts", [1, 5, 8, 9, 70])
def test_every_part_counts(provider: str, parts: int) -> None:
    """Also the last, where a program takes them in several steps, and the first where the others are without keys."""
    outs, lses = draw(parts, 2, 2, 512, "float32", empty=0.0)
    lses /= 10
    check_parts(provider, outs, lses)
    lses[1:], outs[1:] = -math.inf, 0.0
    check_parts(provider, outs, lses)


@pytest.mark.parametrize("provider", OWN)
@pytest.mark.parametrize("size", [1, 5])
def test_odd_sizes(provider: str, size: int) -> None:
    check_two(provider, *draw(2, 6, 3, size, "float32"))
    check_parts(provider, *draw(3, 6, 3, size, "float32"))


@pytest.mark.parametrize("provider", TWO)
def test_neither_part_has_keys(provider: str) -> None:
    outs, lses = draw(2, 6, 3, 64, "bfloat16", empty=1.0)
    assert lses.isinf().all()
    check_two(provider, outs, lses)


@pytest.mark.parametrize("provider", TWO)
def test_lses_that_lie_far_apart(provider: str) -> None:
    outs, lses = draw(2, 6, 3, 64, "bfloat16", empty=0.0)
    lses[0] += 300
    lses[1, 3:] += 600
    check_two(provider, outs, lses)


@pytest.mark.parametrize("provider", OWN)
@pytest.mark.parametrize("few", [0, 10**9])
def test_what_a_part_without_keys_holds_does_not_count(
    provider: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_impl, "FEW_PAIRS", few)
    outs, lses = draw(11, 6, 3, 64, "bfloat16", empty=0.5)
    outs[lses.isinf()] = math.nan
    check_two(provider, outs, lses)
    for parts in (4, 7, 11):
        check_parts(provider, outs[:parts], lses[:parts])


@pytest.mark.parametrize("provider", OWN)
def test_strides(provider: str) -> None:
    outs, lses = draw(18, 10, 8, 64, "bfloat16")
    outs, lses = outs[::2, ::2, 1:7:2, 3:60:3], lses[::2, ::2, 1:7:2]
    check_two(provider, outs, lses)
    check_two(provider, outs, lses.contiguous())
    for parts in (3, 9):
        check_parts(provider, outs[:parts], lses[:parts])
        check_parts(provider, outs[:parts], lses[:parts].contiguous())


@pytest.mark.skipif(not harness.GPU, reason="touches 9 GiB")
@pytest.mark.parametrize("provider", OWN)
def test_more_than_2_to_the_31_elements(provider: str) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < 10 * 2**30:
        pytest.skip(f"9 GiB are needed, {free >> 30} are free")
    outs, lses = draw(2, 5, 2, 64, "bfloat16")
    far = torch.empty(2**32 + 2**20, dtype=torch.bfloat16, device=harness.DEVICE)
    two, parts = (
        registry.implementation(operation, provider) for operation in (MERGE_ATTENTION, MERGE_ATTENTION_PARTS)
    )
    wanted = contract.results_of(MERGE_ATTENTION_PARTS, MERGE_ATTENTION_PARTS.reference, (outs, lses))
    for strides in ((2**11, 2**30, 64, 1), (2**32, 128, 64, 1)):
        spread = far.as_strided(outs.shape, strides).copy_(outs)
        contract.check(MERGE_ATTENTION_PARTS, parts, (spread, lses), wanted)
        contract.check(MERGE_ATTENTION, two, (spread[0], lses[0], spread[1], lses[1]), wanted)


@pytest.mark.parametrize("provider", OWN)
def test_two_halves_of_a_context_make_the_whole(provider: str) -> None:
    """Attention to the first keys and to the rest, of which the rows see only some, is attention to all."""
    generator = torch.Generator().manual_seed(0)
    size, page, keys, rows, first = 16, 4, 30, 9, 24
    cache = torch.randn(2, 8, page, 2, size, generator=generator).to(harness.DEVICE)
    q = torch.randn(rows, 4, size, generator=generator).to(harness.DEVICE)
    table = torch.arange(8, dtype=torch.int32, device=harness.DEVICE)[None]
    run = registry.implementation(PAGED_ATTENTION, provider)

    def attend(table: Tensor, keys: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.tensor([0, rows], dtype=torch.int32, device=harness.DEVICE)
        lengths = torch.tensor([keys], dtype=torch.int32, device=harness.DEVICE)
        bounds = starts, lengths, rows, keys
        return run(q, *cache, table, *bounds, size**-0.5, True, None, 0.0, None, None, positions, False)

    positions = torch.arange(keys - rows, keys, dtype=torch.int32, device=harness.DEVICE)
    out, lse = attend(table, keys, positions)
    parts = attend(table, first, positions), attend(table[:, first // page :], keys - first, positions - first)
    merged, merged_lse = registry.implementation(MERGE_ATTENTION, provider)(*parts[0], *parts[1])
    assert parts[1][1][:3].isneginf().all()
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)


def test_as_torch_sees_it() -> None:
    outs, lses = draw(2, 3, 2, 8, "bfloat16")
    harness.opcheck(MERGE_ATTENTION, (outs[0], lses[0], outs[1], lses[1]))
    harness.opcheck(MERGE_ATTENTION_PARTS, (outs, lses.contiguous()))


def test_what_contradicts_the_schema_is_refused() -> None:
    outs, lses = draw(2, 3, 2, 8, "bfloat16")
    with pytest.raises(ValueError, match="the parts differ"):
        merge_attention(outs[0], lses[0], outs[1, :2], lses[1, :2])
    with pytest.raises(ValueError, match=r"lse \[T, H\] are needed"):
        merge_attention(outs[0], lses[0].mT, outs[1], lses[1])
    with pytest.raises(ValueError, match="at least one part"):
        merge_attention_parts(outs[:0], lses[:0])


def test_what_triton_does_not_serve() -> None:
    outs, lses = torch.empty(2, 1, 1, 1025), torch.empty(2, 1, 1)
    assert "at most 1024" in triton_impl.supports_merge_attention_parts(outs, lses).reason
    many = torch.empty(1025, 1, 1, 8), torch.empty(1025, 1, 1)
    assert "1025 parts" in triton_impl.supports_merge_attention_parts(*many).reason
