"""The causal convolution against an independent float64 sum, one output after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels.causal_conv1d import TOLERANCE, causal_conv1d, causal_conv1d_update

RTOL, ATOL = TOLERANCE["float32"]


def oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """One sequence, float64: x [T, D], weight [D, W], history [D, W - 1]; returns y [T, D] and the last W -
    1 inputs."""
    channels, taps = weight.shape
    past = torch.zeros(channels, taps - 1).double() if history is None else history.double()
    line = torch.cat([past, x.double().T], dim=1)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for d in range(channels):
            total = 0.0 if bias is None else float(bias[d])
            for j in range(taps):
                total += float(weight[d, j]) * float(line[d, t + j])
            y[t, d] = total / (1 + math.exp(-total)) if activation else total
    return y, line[:, line.shape[1] - (taps - 1) :]


def close(got: Tensor, want: Tensor, rtol: float = RTOL, atol: float = ATOL) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


def pool(size: int, channels: int, taps: int, gen: torch.Generator) -> Tensor:
    """States with the channels innermost in memory, as an engine may keep them."""
    return torch.randn(size, taps - 1, channels, generator=gen).transpose(1, 2)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), channels=st.integers(1, 4), taps=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_prefill_equals_the_sum(data: st.DataObject, channels: int, taps: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    slots = [data.draw(st.sampled_from([i + 1, i + 1, 0, -1])) for i in range(len(lengths))]
    resumed = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    activation = data.draw(st.sampled_from(["silu", "swish", None]))
    skip = data.draw(st.integers(0, 2))
    total = sum(lengths)
    wide = torch.full((channels + 1, skip + total + 2), float("nan"))
    x = wide[:channels].T
    x[skip : skip + total] = torch.randn(total, channels, generator=gen)
    weight = torch.randn(taps, channels, generator=gen).T
    bias = torch.randn(channels, generator=gen) if data.draw(st.booleans()) else None
    states = pool(len(lengths) + 2, channels, taps, gen)
    for i, slot in enumerate(slots):
        if slot > 0 and not resumed[i]:
            states[slot] = float("nan")
    before = states.clone()
    cu = skip + torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    out = causal_conv1d(
        x,
        weight,
        bias,
        cu_seqlens=cu,
        state=states,
        slots=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=torch.tensor(resumed),
        activation=activation,
    )

    used = []
    for i, slot in enumerate(slots):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        if slot <= 0:
            assert not out[rows].any()
            continue
        y, last = oracle(x[rows], weight, bias, before[slot] if resumed[i] else None, activation)
        close(out[rows], y)
        if lengths[i]:
            used.append(slot)
            close(states[slot], last)
    assert not out[:skip].any() and not out[skip + total :].any()
    untouched = [s for s in range(len(states)) if s not in used]
    assert torch.equal(states[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), channels=st.integers(1, 5), taps=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_decode_equals_the_sum(data: st.DataObject, channels: int, taps: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    real = data.draw(st.lists(st.integers(1, 8), unique=True, max_size=5))
    slots = data.draw(st.permutations(real + data.draw(st.lists(st.sampled_from([0, -1]), max_size=3))))
    x = torch.randn(len(slots), 2 * channels, generator=gen)[:, ::2]
    for row, slot in enumerate(slots):
        if slot <= 0:
            x[row] = float("nan")
    weight, bias = torch.randn(channels, taps, generator=gen), torch.randn(channels, generator=gen)
    states = pool(9, channels, taps, gen)
    before = states.clone()
    out = causal_conv1d_update(x, weight, bias, state=states, slots=torch.tensor(slots, dtype=torch.int32))
    for row, slot in enumerate(slots):
        if slot <= 0:
            assert not out[row].any()
            continue
        y, last = oracle(x[row : row + 1], weight, bias, before[slot], "silu")
        close(out[row : row + 1], y)
        close(states[slot], last)
    untouched = [s for s in range(9) if s not in real]
    assert torch.equal(states[untouched], before[untouched])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), length=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_any_split_of_a_sequence_equals_one_pass(data: st.DataObject, length: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(length, 3, generator=gen), torch.randn(3, 4, generator=gen)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    whole_state, state = torch.zeros(1, 3, 3), torch.zeros(1, 3, 3)
    common: dict[str, Any] = {"slots": torch.tensor([0]), "null_slot": None}
    whole = causal_conv1d(x, weight, None, cu_seqlens=torch.tensor([0, length]), state=whole_state, **common)
    parts = []
    for a, b in zip([0, *cuts], [*cuts, length], strict=True):
        part = x[a:b]
        if b - a == 1 and a > 0:
            parts.append(causal_conv1d_update(part, weight, None, state=state, **common))
        else:
            resumed = torch.tensor([a > 0])
            cu = torch.tensor([0, b - a])
            parts.append(
                causal_conv1d(part, weight, None, cu_seqlens=cu, state=state, has_initial_state=resumed, **common)
            )
    close(torch.cat(parts), whole)
    assert torch.equal(state, whole_state)


def test_half_precision() -> None:
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 6, generator=gen).bfloat16(), torch.randn(6, 4, generator=gen).bfloat16()
    state = torch.zeros(2, 6, 3, dtype=torch.bfloat16)
    out = causal_conv1d(x, weight, None, cu_seqlens=torch.tensor([0, 9]), state=state, slots=torch.tensor([1]))
    y, last = oracle(x, weight, None, None, "silu")
    assert out.dtype == torch.bfloat16
    close(out, y, *TOLERANCE["bfloat16"])
    assert torch.equal(state[1].double(), last)


def test_zero_rows() -> None:
    state = torch.ones(2, 3, 3)
    slots = torch.tensor([1])
    out = causal_conv1d(
        torch.zeros(0, 3), torch.ones(3, 4), None, cu_seqlens=torch.tensor([0, 0]), state=state, slots=slots
    )
    assert out.shape == (0, 3)
    empty = causal_conv1d_update(torch.zeros(0, 3), torch.ones(3, 4), None, state=state, slots=slots[:0])
    assert empty.shape == (0, 3)
    assert torch.equal(state, torch.ones(2, 3, 3))


def test_wrong_arguments_are_named() -> None:
    x, weight, state, slots = torch.zeros(2, 3), torch.zeros(3, 4), torch.zeros(3, 3, 3), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="weight"):
        causal_conv1d_update(x, weight[:2], None, state=state, slots=slots)
    with pytest.raises(ValueError, match="bias"):
        causal_conv1d_update(x, weight, torch.zeros(2), state=state, slots=slots)
    with pytest.raises(ValueError, match="state must be"):
        causal_conv1d_update(x, weight, None, state=torch.zeros(3, 3, 4), slots=slots)
    with pytest.raises(ValueError, match="slots"):
        causal_conv1d_update(x, weight, None, state=state, slots=slots[:1])
    with pytest.raises(ValueError, match="activation"):
        causal_conv1d_update(x, weight, None, state=state, slots=slots, activation="gelu")
