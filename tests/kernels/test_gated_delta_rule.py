"""The gated delta rule against an independent float64 recurrence, one token after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels.gated_delta_rule import (
    TOLERANCE,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)

RTOL, ATOL = TOLERANCE["float32"]


def oracle(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One sequence, float64: q, k [T, HK, K], v [T, HV, V], g, beta [T, HV], state [HV, V, K]."""
    groups = v.shape[1] // q.shape[1]
    s, out = state.double().clone(), torch.zeros(v.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(v.shape[1]):
            key, query = k[t, h // groups].double(), q[t, h // groups].double()
            s[h] = s[h] * torch.exp(g[t, h].double())
            s[h] += beta[t, h].double() * torch.outer(v[t, h].double() - s[h] @ key, key)
            out[t, h] = scale * (s[h] @ query)
    return out, s


class Case:
    """Random inputs for sequences of the given lengths, in strided storage with NaN around them."""

    def __init__(self, lengths: list[int], hk: int, groups: int, k: int, v: int, seed: int, decay: float = 1.0):
        gen = torch.Generator().manual_seed(seed)
        total, hv = sum(lengths), hk * groups

        def strided(*shape: int) -> Tensor:
            wide = torch.full((shape[0] + 3, *shape[1:-1], shape[-1] + 2), float("nan"))
            view = wide[: shape[0], ..., 1:-1]
            view.copy_(torch.randn(shape, generator=gen))
            return view

        self.lengths = lengths
        self.cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.q, self.k = strided(total, hk, k), strided(total, hk, k)
        self.q /= self.q.norm(dim=-1, keepdim=True)
        self.k /= self.k.norm(dim=-1, keepdim=True)
        self.v = strided(total, hv, v)
        self.g = -decay * torch.rand(total, hv, generator=gen)
        self.beta = torch.rand(total, hv, generator=gen)
        self.state = torch.randn(len(lengths), hv, v, k, generator=gen)
        self.scale = k**-0.5

    def rows(self, a: int, b: int | None) -> dict[str, Any]:
        return {n: getattr(self, n)[a:b] for n in ("q", "k", "v", "g", "beta")}

    def expected(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        outs, finals = [], []
        for i, (a, b) in enumerate(zip(self.cu[:-1].tolist(), self.cu[1:].tolist(), strict=True)):
            start = torch.zeros_like(self.state[i]) if state is None else state[i]
            out, final = oracle(**self.rows(a, b), state=start, scale=self.scale)
            outs.append(out)
            finals.append(final)
        return torch.cat(outs), torch.stack(finals)


def close(got: Tensor, want: Tensor, rtol: float = RTOL, atol: float = ATOL) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, so that a place nobody wrote is seen."""

    def nan_like(original):
        return lambda *a, **kw: original(*a, **kw).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", nan_like(torch.empty))
    monkeypatch.setattr(torch, "empty_like", nan_like(torch.empty_like))


CASES = st.builds(
    Case,
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 7, 8, 9, 16, 17, 31]), min_size=1, max_size=5),
    hk=st.integers(1, 3),
    groups=st.integers(1, 3),
    k=st.sampled_from([1, 4, 7]),
    v=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 2**31),
    decay=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
)


@settings(max_examples=60, deadline=None)
@given(case=CASES, chunk=st.sampled_from([1, 4, 8, 64]), resumed=st.booleans())
def test_chunked_equals_the_recurrence(case: Case, chunk: int, resumed: bool) -> None:
    state = case.state if resumed else None
    kept = case.state.clone()
    out, final = chunk_gated_delta_rule(**case.rows(0, None), cu_seqlens=case.cu, initial_state=state, chunk_size=chunk)
    want_out, want_final = case.expected(state)
    close(out, want_out)
    close(final, want_final)
    assert torch.equal(case.state, kept), "the initial state is the caller's"


@settings(max_examples=30, deadline=None)
@given(data=st.data(), length=st.integers(1, 150), seed=st.integers(0, 2**31))
def test_any_split_of_a_sequence_equals_one_pass(data: st.DataObject, length: int, seed: int) -> None:
    case = Case([length], 2, 2, 8, 8, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    whole, final = chunk_gated_delta_rule(**case.rows(0, length), cu_seqlens=case.cu, initial_state=case.state)
    state, parts = case.state, []
    for a, b in zip([0, *cuts], [*cuts, length], strict=True):
        cu = torch.tensor([0, b - a])
        out, state = chunk_gated_delta_rule(**case.rows(a, b), cu_seqlens=cu, initial_state=state)
        parts.append(out)
    close(torch.cat(parts), whole)
    close(state, final)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 200])
def test_default_chunk_boundaries(length: int) -> None:
    case = Case([length, 3], 1, 2, 16, 8, seed=length, decay=0.2)
    out, final = chunk_gated_delta_rule(**case.rows(0, None), cu_seqlens=case.cu, initial_state=case.state)
    want_out, want_final = case.expected(case.state)
    close(out, want_out)
    close(final, want_final)


def test_strong_decay_neither_overflows_nor_blurs_its_neighbours() -> None:
    case = Case([70], 1, 1, 8, 8, seed=3, decay=0.05)
    case.g[::7] = torch.tensor([-1e5, -90.0, -300.0, float("-inf"), -104.0, -88.0, -5e3, -1e9, -70.0, -1e5])[:, None]
    out, final = chunk_gated_delta_rule(**case.rows(0, None), cu_seqlens=case.cu, initial_state=case.state)
    assert torch.isfinite(out).all() and torch.isfinite(final).all()
    want_out, want_final = case.expected(case.state)
    close(out, want_out)
    close(final, want_final)


def test_rows_outside_every_sequence_are_zero_and_unread() -> None:
    case = Case([4, 5], 1, 1, 4, 4, seed=0)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(case, name)[4:] = float("nan")
    out, final = chunk_gated_delta_rule(**case.rows(0, None), cu_seqlens=torch.tensor([0, 4]))
    want, _ = oracle(**case.rows(0, 4), state=torch.zeros(1, 4, 4), scale=case.scale)
    close(out[:4], want)
    assert torch.equal(out[4:], torch.zeros(5, 1, 4))
    assert torch.isfinite(final).all()


def test_sequences_may_start_behind_row_zero() -> None:
    case = Case([3, 6], 1, 2, 4, 4, seed=5)
    out, final = chunk_gated_delta_rule(**case.rows(0, None), cu_seqlens=torch.tensor([3, 9]))
    want_out, want_final = oracle(**case.rows(3, 9), state=torch.zeros(2, 4, 4), scale=case.scale)
    close(out[3:], want_out)
    close(final[0], want_final)
    assert not out[:3].any()


@pytest.mark.parametrize("num_seqs", [0, 1, 2])
def test_no_tokens(num_seqs: int) -> None:
    case = Case([0] * num_seqs, 1, 1, 4, 4, seed=0)
    cu = torch.zeros(num_seqs + 1, dtype=torch.int32)
    out, final = chunk_gated_delta_rule(**case.rows(0, 0), cu_seqlens=cu, initial_state=case.state)
    assert out.shape == (0, 1, 4)
    assert torch.equal(final, case.state)
    final += 1
    assert not torch.equal(final, case.state) or num_seqs == 0, "the initial state is the caller's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype) -> None:
    case = Case([40, 9], 2, 2, 16, 16, seed=11)
    rows = {n: x.to(dtype) for n, x in case.rows(0, None).items()}
    out, final = chunk_gated_delta_rule(**rows, cu_seqlens=case.cu)
    assert out.dtype == dtype and final.dtype == torch.float32
    for n, x in rows.items():
        setattr(case, n, x)
    want_out, want_final = case.expected(None)
    rtol, atol = TOLERANCE[str(dtype).removeprefix("torch.")]
    close(out, want_out, rtol, atol)
    close(final, want_final)


def pool(case: Case, slots: list[int], size: int) -> Tensor:
    """A strided pool of states: those of `slots` as in the case, NaN everywhere else."""
    wide = torch.full((size, 2, *case.state.shape[1:]), float("nan"))
    states = wide[:, 1]
    for row, slot in enumerate(slots):
        if slot > 0:
            states[slot] = case.state[row]
    return states


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    hk=st.integers(1, 3),
    groups=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    decay=st.sampled_from([0.1, 1.0, 300.0]),
)
def test_decode_equals_one_step_of_the_recurrence(
    data: st.DataObject, hk: int, groups: int, seed: int, decay: float
) -> None:
    real = data.draw(st.lists(st.integers(1, 9), unique=True, max_size=6))
    slots = data.draw(st.permutations(real + data.draw(st.lists(st.sampled_from([0, -1]), max_size=3))))
    case = Case([1] * len(slots) or [0], hk, groups, 4, 6, seed, decay)
    states = pool(case, list(slots), 10)
    before = states.clone()
    out = recurrent_gated_delta_rule(
        **case.rows(0, len(slots)), state=states, slots=torch.tensor(slots, dtype=torch.int32)
    )
    for row, slot in enumerate(slots):
        if slot <= 0:
            assert not out[row].any()
            continue
        want, final = oracle(**case.rows(row, row + 1), state=case.state[row], scale=case.scale)
        close(out[row : row + 1], want)
        close(states[slot], final)
    untouched = [s for s in range(10) if s not in real]
    assert torch.equal(states[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


def test_prefill_then_decode_equals_one_prefill() -> None:
    case = Case([30], 2, 2, 8, 8, seed=21)
    whole, final = chunk_gated_delta_rule(**case.rows(0, 30), cu_seqlens=case.cu)
    out, state = chunk_gated_delta_rule(**case.rows(0, 20), cu_seqlens=torch.tensor([0, 20]))
    parts, slots = [out], torch.tensor([0])
    for t in range(20, 30):
        step = recurrent_gated_delta_rule(**case.rows(t, t + 1), state=state, slots=slots, null_slot=None)
        parts.append(step)
    close(torch.cat(parts), whole)
    close(state, final)


def test_half_precision_state_is_rounded_once() -> None:
    case = Case([1, 1], 1, 1, 8, 8, seed=2)
    states = case.state.to(torch.bfloat16)
    start = states.clone()
    recurrent_gated_delta_rule(**case.rows(0, 2), state=states, slots=torch.tensor([0, 1]), null_slot=None)
    for row in range(2):
        _, final = oracle(**case.rows(row, row + 1), state=start[row], scale=case.scale)
        torch.testing.assert_close(states[row].double(), final, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 1, 4)}, "q and k"),
        ({"v": torch.zeros(4, 2, 4)}, "v must be"),
        ({"g": torch.zeros(3, 1)}, "g and beta"),
        (
            {"v": torch.zeros(3, 3, 4), "g": torch.zeros(3, 3), "beta": torch.zeros(3, 3)},
            "multiple of the key heads",
        ),
        ({"initial_state": torch.zeros(2, 2, 4, 4)}, "initial_state"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, Tensor], message: str) -> None:
    qkv, gates = torch.zeros(3, 2, 4), torch.zeros(3, 2)
    args: dict[str, Any] = {"q": qkv, "k": qkv, "v": qkv, "g": gates, "beta": gates, **change}
    with pytest.raises(ValueError, match=message):
        chunk_gated_delta_rule(**args, cu_seqlens=torch.tensor([0, 3]))


def test_wrong_slots_and_pools_are_named() -> None:
    case = Case([1, 1], 1, 1, 4, 4, seed=0)
    with pytest.raises(ValueError, match="slots"):
        recurrent_gated_delta_rule(**case.rows(0, 2), state=case.state, slots=torch.tensor([1]))
    with pytest.raises(ValueError, match="state has shape"):
        recurrent_gated_delta_rule(**case.rows(0, 2), state=case.state[..., :2], slots=torch.tensor([1, 2]))
