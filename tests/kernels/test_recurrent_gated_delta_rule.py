"""The recurrent gated delta rule: every provider against the references, drafts against an independent recurrence."""

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
from atom_patches.kernels.gated_delta_rule.recurrent import (
    OPERATIONS,
    RECURRENT_GATED_DELTA_RULE,
    TOLERANCE,
    VERIFY_GATED_DELTA_RULE,
    recurrent_gated_delta_rule,
    verify_gated_delta_rule,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROVIDED = [
    pytest.param(operation, provider, id=f"{operation.name}-{provider}")
    for operation in OPERATIONS
    for provider in harness.providers(operation)
]


def oracle(rows: tuple[Tensor, ...], state: Tensor, scale: float) -> tuple[Tensor, list[Tensor]]:
    """One sequence, float64: q, k [T, HK, K], v [T, HV, V], g, beta [T, HV], state [HV, V, K]; every state."""
    q, k, v, g, beta = (x.double() for x in rows)
    group = v.shape[1] // q.shape[1]
    s, out, states = state.double().clone(), torch.zeros_like(v), []
    for t in range(q.shape[0]):
        for h in range(v.shape[1]):
            key = k[t, h // group]
            s[h] *= math.exp(g[t, h])
            s[h] += beta[t, h] * torch.outer(v[t, h] - s[h] @ key, key)
            out[t, h] = scale * (s[h] @ q[t, h // group])
        states.append(s.clone())
    return out, states


class Inputs:
    """Rows, states and slots; in strided storage with NaN around them unless `plain`, which is what an engine takes."""

    def __init__(
        self, rows: int, hk: int = 2, group: int = 2, k: int = 8, v: int = 8, *, seed: int = 0, dtype: str = "float32",
        state_dtype: str = "float32", plain: bool = False, decay: float = 1.0, transposed: bool = False, pool: int = 8,
    ) -> None:  # fmt: skip
        self._gen, self._plain = torch.Generator().manual_seed(seed), plain
        hv, kind = hk * group, DTYPES[dtype]
        unit = [torch.nn.functional.normalize(torch.randn(rows, hk, k, generator=self._gen), dim=-1) for _ in "qk"]
        self.rows = (
            self._place(unit[0], kind),
            self._place(unit[1], kind),
            self._place(torch.randn(rows, hv, v, generator=self._gen), kind),
            self._place(-decay * torch.rand(rows, hv, generator=self._gen), torch.float32),
            self._place(torch.rand(rows, hv, generator=self._gen), torch.float32),
        )
        state, kind = torch.randn(pool, hv, v, k, generator=self._gen), DTYPES[state_dtype]
        self.state = self._place(state.mT, kind).mT if transposed else self._place(state, kind)
        self.scale = k**-0.5

    def _place(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        extra = 0 if self._plain else 2
        wide = torch.full((values.shape[0], *values.shape[1:-1], values.shape[-1] + extra), float("nan"))
        wide[..., : values.shape[-1]] = values
        return wide.to(harness.DEVICE, dtype)[..., : values.shape[-1]]

    def index(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        plain = torch.tensor(values, dtype=dtype)
        if self._plain or plain.numel() < 2:
            return plain.to(harness.DEVICE)
        return plain.repeat_interleave(2, dim=-1).to(harness.DEVICE)[..., ::2]

    def step(self, slots: list[int], null_slot: int | None = 0) -> tuple[Any, ...]:
        return *self.rows, self.state, self.index(slots), self.scale, null_slot

    def draft(
        self, cu: list[int], slots: list[list[int]], accepted: list[int], null_slot: int | None = 0
    ) -> tuple[Any, ...]:
        places = self.index(slots).reshape(len(cu) - 1, -1) if slots else self.index([]).reshape(0, 2)
        return *self.rows, self.index(cu), self.state, places, self.index(accepted), self.scale, null_slot


SHAPES: dict[str, Any] = {
    "hk": st.integers(1, 2),
    "group": st.integers(1, 3),
    "k": st.sampled_from([1, 7, 16]),
    "v": st.sampled_from([1, 8, 19, 40]),
    "seed": st.integers(0, 2**31),
    "state_dtype": st.sampled_from(["float32", "bfloat16"]),
    "decay": st.sampled_from([0.1, 300.0]),
    "transposed": st.booleans(),
}


def engine_shapes(shape: dict[str, Any]) -> dict[str, Any]:
    return shape | {"plain": True, "transposed": False}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", harness.providers(RECURRENT_GATED_DELTA_RULE))
@harness.examples(4)
@given(data=st.data(), shape=st.fixed_dictionaries(SHAPES))
def test_every_provider_steps(provider: str, dtype: str, data: st.DataObject, shape: dict[str, Any]) -> None:
    if provider == "engine":
        shape = engine_shapes(shape)
    padding = data.draw(st.lists(st.sampled_from([0, -1]), max_size=2), label="padding")
    real = data.draw(st.lists(st.integers(1, 7), unique=True, max_size=4), label="slots")
    slots = data.draw(st.permutations(real + padding))
    inputs = Inputs(len(slots), dtype=dtype, **shape)
    arguments = inputs.step(slots)
    assume(registry.supports(RECURRENT_GATED_DELTA_RULE, provider, arguments).ok)
    harness.check(RECURRENT_GATED_DELTA_RULE, provider, arguments, tolerance=TOLERANCE[widest(dtype, shape)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", harness.providers(VERIFY_GATED_DELTA_RULE))
@harness.examples(4)
@given(data=st.data(), shape=st.fixed_dictionaries(SHAPES))
def test_every_provider_verifies(provider: str, dtype: str, data: st.DataObject, shape: dict[str, Any]) -> None:
    seqs, longest = data.draw(st.integers(1, 3), label="N"), data.draw(st.integers(1, 4), label="n")
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=seqs, max_size=seqs), label="lengths")
    distinct = list(range(1, seqs * longest + 1))
    if provider == "engine":
        shape = engine_shapes(shape)
    outside = data.draw(st.integers(0, 2), label="outside")
    padding = [True, False, False, False]
    flat = data.draw(st.permutations(distinct))
    flat = [data.draw(st.sampled_from([0, -1])) if data.draw(st.sampled_from(padding)) else slot for slot in flat]
    slots = [flat[i * longest : (i + 1) * longest] for i in range(seqs)]
    accepted = data.draw(st.lists(st.integers(1, longest), min_size=seqs, max_size=seqs), label="accepted")
    inputs = Inputs(sum(lengths) + 2 * outside, dtype=dtype, pool=seqs * longest + 1, **shape)
    cu = [outside + sum(lengths[:i]) for i in range(seqs + 1)]
    arguments = inputs.draft(cu, slots, accepted)
    assume(registry.supports(VERIFY_GATED_DELTA_RULE, provider, arguments).ok)
    harness.check(VERIFY_GATED_DELTA_RULE, provider, arguments, tolerance=TOLERANCE[widest(dtype, shape)])


def widest(dtype: str, shape: dict[str, Any]) -> str:
    return dtype if shape["state_dtype"] == "float32" else shape["state_dtype"]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_accepted_drafts_equal_one_recurrence(data: st.DataObject, seed: int) -> None:
    """Of each draft a part is accepted; outputs and the states behind every accepted token are the recurrence's."""
    inputs = Inputs(14, seed=seed)
    longest = data.draw(st.integers(1, 3))
    slots = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:longest].to(harness.DEVICE)[None] + 1
    rows, start, at, accepted = inputs.rows, inputs.state[slots[0, 0]].clone(), 0, 1
    outs: list[Tensor] = []
    while at < 10:
        length = data.draw(st.integers(1, longest))
        tried = tuple(x[at : at + length] for x in rows)
        out = verify_gated_delta_rule(
            *tried,
            cu_seqlens=torch.tensor([0, length], device=harness.DEVICE),
            state=inputs.state,
            slots=slots,
            num_accepted=torch.tensor([accepted], device=harness.DEVICE),
        )
        accepted = data.draw(st.integers(1, length))
        outs.append(out[:accepted])
        at += accepted
        want, states = oracle(tuple(x[:at] for x in rows), start, inputs.scale)
        for j in range(accepted):
            close(inputs.state[slots[0, j]], states[at - accepted + j])
    close(torch.cat(outs), want)


def close(got: Tensor, want: Tensor) -> None:
    rtol, atol = TOLERANCE["float32"]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("provider", harness.providers(RECURRENT_GATED_DELTA_RULE))
@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_served_shape(provider: str, rows: int, state_dtype: str) -> None:
    """Keys of 128 and several strips of values, as the GPU runs them."""
    inputs = Inputs(rows, hk=1, group=2, k=128, v=33, plain=True, dtype="bfloat16", state_dtype=state_dtype)
    arguments = inputs.step(list(range(1, rows + 1)))
    if provider == "engine" and not rows:
        assert not registry.supports(RECURRENT_GATED_DELTA_RULE, provider, arguments).ok
        return
    harness.check(RECURRENT_GATED_DELTA_RULE, provider, arguments, tolerance=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("provider", harness.providers(VERIFY_GATED_DELTA_RULE))
@pytest.mark.parametrize(("cu", "slots"), [([0], []), ([0, 0], [[1, 2]]), ([0, 0, 0], [[1, 2], [3, 4]])])
def test_no_drafted_row(provider: str, cu: list[int], slots: list[list[int]]) -> None:
    arguments = Inputs(0).draft(cu, slots, [1] * len(slots))
    harness.check(VERIFY_GATED_DELTA_RULE, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", harness.providers(RECURRENT_GATED_DELTA_RULE))
def test_slot_zero_is_real_where_no_slot_is_null(provider: str) -> None:
    inputs = Inputs(2)
    harness.check(RECURRENT_GATED_DELTA_RULE, provider, inputs.step([0, 3], None), tolerance=TOLERANCE["float32"])
    arguments = inputs.draft([0, 2], [[0, 3]], [1], None)
    harness.check(VERIFY_GATED_DELTA_RULE, provider, arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", harness.providers(RECURRENT_GATED_DELTA_RULE))
def test_a_decay_to_nothing(provider: str) -> None:
    inputs = Inputs(2, plain=provider == "engine")
    inputs.rows[3].fill_(float("-inf"))
    harness.check(RECURRENT_GATED_DELTA_RULE, provider, inputs.step([1, 3]), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", harness.providers(RECURRENT_GATED_DELTA_RULE))
@pytest.mark.parametrize("transposed", [False, True])
def test_padding(provider: str, transposed: bool) -> None:
    """Rows and drafts of padding between real ones, and drafts whose second state has no slot."""
    inputs = Inputs(8, k=7, v=9, transposed=transposed, plain=provider == "engine")
    harness.check(
        RECURRENT_GATED_DELTA_RULE, provider, inputs.step([3, 0, 1, -1, 7, 2, 4, 0]), tolerance=TOLERANCE["float32"]
    )
    arguments = inputs.draft([0, 2, 4, 6, 8], [[1, 2], [0, 0], [4, -1], [5, 0]], [2, 1, 1, 1])
    harness.check(VERIFY_GATED_DELTA_RULE, provider, arguments, tolerance=TOLERANCE["float32"])


def test_as_torch_sees_it() -> None:
    inputs = Inputs(3)
    harness.opcheck(RECURRENT_GATED_DELTA_RULE, inputs.step([1, 0, 3]))
    harness.opcheck(VERIFY_GATED_DELTA_RULE, inputs.draft([0, 2, 3], [[1, 2], [3, 4]], [1, 2]))


def test_triton_refuses_what_it_cannot_compute() -> None:
    arguments = Inputs(2).step([1, 2])
    verdict = registry.supports(RECURRENT_GATED_DELTA_RULE, "triton", (arguments[0].double(), *arguments[1:]))
    assert not verdict.ok and "float64" in verdict.reason
    arguments = Inputs(2, k=600).draft([0, 2], [[1, 2]], [1])
    verdict = registry.supports(VERIFY_GATED_DELTA_RULE, "triton", arguments)
    assert not verdict.ok and "600" in verdict.reason


def test_wrong_slots_and_pools_are_named() -> None:
    inputs = Inputs(2)
    with pytest.raises(ValueError, match="slots has shape"):
        recurrent_gated_delta_rule(*inputs.rows, state=inputs.state, slots=inputs.index([1]))
    with pytest.raises(ValueError, match="state has shape"):
        recurrent_gated_delta_rule(*inputs.rows, state=inputs.state[..., :2], slots=inputs.index([1, 2]))
    cu, accepted = inputs.index([0, 2]), inputs.index([1])
    common: dict[str, Any] = {"cu_seqlens": cu, "num_accepted": accepted}
    with pytest.raises(ValueError, match=r"slots must be \[N, n\]"):
        verify_gated_delta_rule(*inputs.rows, state=inputs.state, slots=inputs.index([1, 2]), **common)
    with pytest.raises(ValueError, match="state has shape"):
        verify_gated_delta_rule(*inputs.rows, state=inputs.state[:, 1:], slots=inputs.index([[1, 2]]), **common)
