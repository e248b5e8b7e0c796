"""The causal convolution: the reference against an independent float64 sum, every provider against the reference."""

from __future__ import annotations

import math
from typing import Any

import harness
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.causal_conv1d import (
    CAUSAL_CONV1D,
    CAUSAL_CONV1D_HALO,
    CAUSAL_CONV1D_UPDATE,
    CAUSAL_CONV1D_VERIFY,
    OPERATIONS,
    TOLERANCE,
    causal_conv1d,
    causal_conv1d_halo,
    causal_conv1d_update,
    causal_conv1d_verify,
    triton_impl,
)

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
    cu = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="weight"):
        causal_conv1d_update(x, weight[:2], None, state=state, slots=slots)
    with pytest.raises(ValueError, match="bias"):
        causal_conv1d_update(x, weight, torch.zeros(2), state=state, slots=slots)
    with pytest.raises(ValueError, match="state must be"):
        causal_conv1d_update(x, weight, None, state=torch.zeros(3, 3, 2), slots=slots)
    with pytest.raises(ValueError, match="slots"):
        causal_conv1d_update(x, weight, None, state=state, slots=slots[:1])
    with pytest.raises(ValueError, match="activation"):
        causal_conv1d_update(x, weight, None, state=state, slots=slots, activation="gelu")
    with pytest.raises(ValueError, match="has_initial_state"):
        causal_conv1d(x, weight, None, cu_seqlens=cu, state=state, slots=slots, has_initial_state=slots[:1] > 0)
    with pytest.raises(ValueError, match="num_accepted"):
        causal_conv1d_verify(x, weight, None, cu_seqlens=cu, state=state, slots=slots, num_accepted=slots[:1])
    with pytest.raises(ValueError, match="halo must be"):
        causal_conv1d_halo(x, weight, None, cu_seqlens=cu, halo=torch.zeros(2, 2, 3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_conv1d_halo(x, weight, None, cu_seqlens=cu[:0], halo=torch.zeros(2, 3, 3))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), length=st.integers(1, 20), taps=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_pieces_with_halos_equal_one_pass(data: st.DataObject, length: int, taps: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(length, 3, generator=gen), torch.randn(3, taps, generator=gen)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    bounds = [0, *cuts, length]
    padded = torch.cat([torch.zeros(taps - 1, 3), x])
    halo = torch.stack([padded[a : a + taps - 1] for a in bounds[:-1]])
    out, last = causal_conv1d_halo(x, weight, None, cu_seqlens=torch.tensor(bounds), halo=halo)
    state = torch.zeros(1, 3, taps - 1)
    common: dict[str, Any] = {"slots": torch.tensor([0]), "null_slot": None}
    whole = causal_conv1d(x, weight, None, cu_seqlens=torch.tensor([0, length]), state=state, **common)
    close(out, whole)
    assert torch.equal(last[-1].T, state[0])
    assert torch.equal(last[:-1], halo[1:]), "the rows behind which a piece ends are the halo of the next"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), taps=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_accepted_drafts_equal_one_pass(data: st.DataObject, taps: int, seed: int) -> None:
    """Drafts of which only a part is accepted; what was accepted, convolved at once, is the same."""
    gen = torch.Generator().manual_seed(seed)
    longest = data.draw(st.integers(1, 4))
    weight = torch.randn(3, taps, generator=gen)
    state = torch.full((2, 3, taps - 2 + longest), float("nan")) if longest > 1 else torch.zeros(2, 3, taps - 1)
    common: dict[str, Any] = {"state": state, "slots": torch.tensor([1])}
    accepted, kept, outs = 1, [torch.randn(5, 3, generator=gen)], []
    outs.append(causal_conv1d(kept[0], weight, None, cu_seqlens=torch.tensor([0, 5]), **common))
    for _ in range(4):
        draft = torch.randn(data.draw(st.integers(1, longest)), 3, generator=gen)
        cu = torch.tensor([0, len(draft)])
        y = causal_conv1d_verify(draft, weight, None, cu_seqlens=cu, num_accepted=torch.tensor([accepted]), **common)
        accepted = data.draw(st.integers(1, len(draft)))
        kept.append(draft[:accepted])
        outs.append(y[:accepted])
    whole, _ = oracle(torch.cat(kept), weight, None, None, "silu")
    close(torch.cat(outs), whole)


# Every provider against the reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROVIDED = [
    pytest.param(operation, provider, id=f"{operation.name}-{provider}")
    for operation in OPERATIONS
    for provider in harness.providers(operation)
]


class Inputs:
    """Arguments of every operator for one drawn batch. Engines take bounds and counts in line only, and not any
    weights."""

    def __init__(self, data: st.DataObject, dtype: str, engine: bool) -> None:
        gen = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
        self._gen, self._dtype, self._in_line = gen, DTYPES[dtype], engine
        self._dense = engine and data.draw(st.booleans(), label="dense")
        taps = data.draw(st.sampled_from([2, 4, 4] if engine else [2, 4, 4, 5]), label="taps")
        channels = data.draw(st.sampled_from([5, 300]), label="channels")
        lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 9, 16, 17, 40]), min_size=1, max_size=4), label="T")
        draft = data.draw(st.lists(st.integers(1, 4), min_size=len(lengths), max_size=len(lengths)), label="draft")
        outside = data.draw(st.integers(0, 3), label="outside")
        seqs, self.lengths, self.draft = len(lengths), lengths, draft
        self.activation = data.draw(st.sampled_from(["silu", None]), label="activation")
        self.weight = self._draw(channels, taps)
        self.bias = self._draw(channels) if data.draw(st.booleans(), label="bias") else None
        self.x = self._draw(sum(lengths) + 2 * outside, channels)
        self.cu = self._index([outside, *lengths]).cumsum(0, dtype=torch.int32)
        self.drafted = self._draw(sum(draft) + 2 * outside, channels)
        self.drafted_cu = self._index([outside, *draft]).cumsum(0, dtype=torch.int32)
        slots = data.draw(st.permutations(range(1, seqs + 3)), label="slots")[:seqs]
        self.slots = self._index([data.draw(st.sampled_from([s, s, 0, -1])) for s in slots])
        flags = data.draw(st.lists(st.booleans(), min_size=seqs, max_size=seqs), label="resumed")
        self.resumed = torch.tensor(flags, device=harness.DEVICE)
        self.accepted = self._index(data.draw(st.lists(st.integers(1, 3), min_size=seqs, max_size=seqs)))
        places = taps + 3  # W - 2 + 4 drafted tokens, one accepted token fewer than 4 to read behind, and one spare
        self._past = taps - 1 if engine and data.draw(st.booleans(), label="no spare place") else places
        self.halo = self._draw(seqs, taps - 1, channels)
        self.state = self._draw(seqs + 3, places, channels).mT
        if data.draw(st.booleans(), label="channels outermost"):
            self.state = self._draw(seqs + 3, channels, places)

    def _draw(self, *shape: int) -> Tensor:
        wide = torch.full((*shape[:-1], shape[-1] + (0 if self._dense else 3)), float("nan"))
        wide[..., : shape[-1]] = torch.randn(shape, generator=self._gen)
        return wide.to(harness.DEVICE, self._dtype)[..., : shape[-1]]

    def _index(self, values: list[int]) -> Tensor:
        wide = torch.full((len(values), 1 if self._in_line or len(values) == 1 else 2), 99, dtype=torch.int32)
        wide[:, 0] = torch.tensor(values)
        return wide.to(harness.DEVICE)[:, 0]

    def arguments(self, operation: registry.Operation) -> tuple[Any, ...]:
        head, common = (self.weight, self.bias), (self.activation, 0)
        if operation is CAUSAL_CONV1D:
            return self.x, *head, self.cu, self._shorter_state(), self.slots, self.resumed, *common
        if operation is CAUSAL_CONV1D_HALO:
            return self.x, *head, self.cu, self.halo, self.activation
        if operation is CAUSAL_CONV1D_UPDATE:
            return self.x[: len(self.slots)], *head, self._shorter_state(), self.slots[: len(self.x)], *common
        return self.drafted, *head, self.drafted_cu, self.state, self.slots, self.accepted, *common

    def _shorter_state(self) -> Tensor:
        """As some engines keep states: without room for drafts."""
        return self.state if self._past == self.state.shape[2] else self.state[:, :, : self._past].clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("operation", "provider"), PROVIDED)
@harness.examples(4)
@given(data=st.data())
def test_every_provider(operation: registry.Operation, provider: str, dtype: str, data: st.DataObject) -> None:
    usual = (x.to(DTYPES[dtype]) if is_float(x) else x for x in simple([3, 1])[operation])
    if not (verdict := registry.supports(operation, provider, tuple(usual))).ok:
        pytest.skip(verdict.reason)
    arguments = Inputs(data, dtype, engine=provider == "engine").arguments(operation)
    assume(registry.supports(operation, provider, arguments).ok)
    harness.check(operation, provider, arguments, tolerance=TOLERANCE[dtype])


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def simple(lengths: list[int], channels: int = 24, taps: int = 4) -> dict[registry.Operation, tuple[Any, ...]]:
    """Arguments of every operator for sequences of these lengths, in slots 1, 2, ..., the first of each pair resumed
    and with one accepted token, the other fresh and with two."""
    gen = torch.Generator().manual_seed(len(lengths))
    device, seqs, rows = harness.DEVICE, len(lengths), sum(lengths)
    x = torch.randn(rows, channels, generator=gen).to(device)
    head = (x, torch.randn(channels, taps, generator=gen).to(device), torch.randn(channels, generator=gen).to(device))
    slots, places = max(rows, seqs) + 1, (taps - 1, taps + 3)
    state, drafted_on = (torch.randn(slots, past, channels, generator=gen).to(device).mT for past in places)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    slots = torch.arange(1, seqs + 1, device=device)
    resumed, accepted = slots % 2 == 1, (slots + 1) % 2 + 1
    halo = torch.randn(seqs, taps - 1, channels, generator=gen).to(device)
    return {
        CAUSAL_CONV1D: (*head, cu, state, slots, resumed, "silu", 0),
        CAUSAL_CONV1D_HALO: (*head, cu, halo, "silu"),
        CAUSAL_CONV1D_UPDATE: (*head, state, torch.arange(1, rows + 1, device=device), "silu", 0),
        CAUSAL_CONV1D_VERIFY: (*head, cu, drafted_on, slots, accepted, "silu", 0),
    }


@pytest.mark.parametrize(("operation", "provider"), PROVIDED)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1, 2, 5] * 3], ids=["none", "empty", "three-empty", "nine"])
def test_no_rows_and_many_sequences(
    operation: registry.Operation, provider: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The many are more than a program looks through at a time."""
    monkeypatch.setattr(triton_impl, "SEARCH", 4)
    arguments = simple(lengths)[operation]
    if provider == "engine" and not sum(lengths):
        assert not registry.supports(operation, provider, arguments).ok
        return
    harness.check(operation, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize(("operation", "provider"), PROVIDED)
def test_sequences_of_several_blocks(operation: registry.Operation, provider: str) -> None:
    """Blocks that start inside a sequence, and several blocks of channels."""
    if operation in (CAUSAL_CONV1D, CAUSAL_CONV1D_HALO):
        arguments = simple([40, 19], channels=260)[operation]
        harness.check(operation, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize(("operation", "provider"), PROVIDED)
def test_slot_zero_is_real_where_no_slot_is_null(operation: registry.Operation, provider: str) -> None:
    if operation is CAUSAL_CONV1D_HALO:
        return
    arguments = list(simple([3, 1])[operation])
    position = 4 if operation is CAUSAL_CONV1D_UPDATE else 5
    arguments[position], arguments[-1] = arguments[position] - 1, None
    harness.check(operation, provider, tuple(arguments), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize(("operation", "provider"), PROVIDED)
def test_padding(operation: registry.Operation, provider: str) -> None:
    """Padding of both kinds between real sequences."""
    arguments = list(simple([1, 1, 1, 1, 1])[operation])
    if operation is not CAUSAL_CONV1D_HALO:
        slots = arguments[4 if operation is CAUSAL_CONV1D_UPDATE else 5]
        slots[1], slots[3] = 0, -1
    harness.check(operation, provider, tuple(arguments), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", harness.providers(CAUSAL_CONV1D))
def test_without_flags_every_sequence_starts_from_zeros(provider: str) -> None:
    arguments = list(simple([3, 1])[CAUSAL_CONV1D])
    arguments[6] = None
    arguments[4].fill_(float("nan"))
    harness.check(CAUSAL_CONV1D, provider, tuple(arguments), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_as_torch_sees_it(operation: registry.Operation) -> None:
    harness.opcheck(operation, simple([3, 1])[operation])


def test_triton_refuses_what_it_cannot_compute() -> None:
    for operation, arguments in simple([3, 1]).items():
        doubled = (arguments[0].double(), *arguments[1:])
        verdict = registry.supports(operation, "triton", doubled)
        assert not verdict.ok and "float64" in verdict.reason
