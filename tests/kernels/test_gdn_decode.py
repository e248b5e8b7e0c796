"""A GatedDeltaNet layer's decode and verification: the reference against float64 formulas, providers against it."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import harness
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import contract, registry
from atom_patches.kernels.gdn_chain import _decode_triton
from atom_patches.kernels.gdn_chain.decode import GDN_DECODE, GDN_VERIFY, gdn_decode, gdn_verify

TOLERANCE = GDN_DECODE.tolerance
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROVIDERS = harness.providers(GDN_DECODE)


class Inputs:
    """Arguments in strided storage with NaN around them, unless `plain`, which is what an engine takes."""

    def __init__(
        self, slots: list[int], hk: int = 2, group: int = 2, k: int = 8, v: int = 8, taps: int = 4, *, seed: int = 0,
        dtype: str = "float32", state_dtype: str = "float32", plain: bool = False, transposed: bool = False,
        bias: bool = True, activation: str | None = "silu", channels_last: bool = True, pool: int = 8,
        extra_places: int = 0,
    ) -> None:  # fmt: skip
        gen, kind, rows, hv = torch.Generator().manual_seed(seed), DTYPES[dtype], len(slots), hk * group
        channels = 2 * hk * k + hv * v

        def draw(*shape: int, to: torch.dtype = kind) -> Tensor:
            wide = torch.full((*shape[:-1], shape[-1] + (0 if plain else 2)), float("nan"))
            wide[..., : shape[-1]] = torch.randn(shape, generator=gen)
            return wide.to(harness.DEVICE, to)[..., : shape[-1]]

        places = taps - 1 + extra_places if plain else taps + 1
        state = DTYPES[state_dtype]
        index = torch.tensor(slots, dtype=torch.int32)
        if not plain and rows > 1:
            index = index.repeat_interleave(2)
        self.arguments: tuple[Any, ...] = (
            draw(rows, channels), draw(rows, hv), draw(rows, hv), draw(channels, taps),
            draw(channels) if bias else None,
            draw(pool, places, channels).mT if channels_last else draw(pool, channels, places),
            draw(pool, hv, k, v, to=state).mT if transposed else draw(pool, hv, v, k, to=state),
            index.to(harness.DEVICE)[:: 1 if len(index) == rows else 2],
            draw(hv, to=torch.float32), draw(hv), k**-0.5, 1e-6, activation, 0,
        )  # fmt: skip

    def drafts(self, cu: list[int], slots: Any, accepted: list[int]) -> tuple[Any, ...]:
        """Arguments of `gdn_verify`; the rows are as many as slots were given."""
        device = harness.DEVICE
        places = torch.tensor(slots or [[]], dtype=torch.int32, device=device)
        bounds = torch.tensor(cu, dtype=torch.int32, device=device)
        counts = torch.tensor(accepted, dtype=torch.int32, device=device)
        return *self.arguments[:7], bounds, places if slots else places.reshape(0, 1), counts, *self.arguments[8:]


@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_is_the_formula(bias: bool) -> None:
    hk, group, k, v, taps = 2, 2, 4, 3, 3
    arguments = Inputs([3, 0, 1], hk, group, k, v, taps, bias=bias).arguments
    x, a, b, weight, offset, conv, state, slots, log, dt = (
        t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in arguments[:10]
    )
    before, history = state.clone(), conv.clone()
    out = gdn_decode(
        *arguments[:3], conv_weight=arguments[3], conv_bias=arguments[4], conv_state=arguments[5],
        ssm_state=arguments[6], slots=slots, A_log=arguments[8], dt_bias=arguments[9],
    )  # fmt: skip
    for row, slot in ((0, 3), (2, 1)):
        y = torch.zeros_like(x[row])
        for d in range(x.shape[1]):
            total = 0.0 if offset is None else float(offset[d])
            for j in range(taps - 1):
                total += float(weight[d, j] * history[slot, d, j])
            total += float(weight[d, taps - 1] * x[row, d])
            y[d] = total / (1 + math.exp(-total))
        q, key = (y[i * hk * k : (i + 1) * hk * k].view(hk, k) for i in range(2))
        value = y[2 * hk * k :].view(hk * group, v)
        for h in range(hk * group):
            decay = math.exp(-math.exp(log[h]) * math.log1p(math.exp(a[row, h] + dt[h])))
            beta = 1 / (1 + math.exp(-b[row, h]))
            one, asked = key[h // group], q[h // group]
            one, asked = one / math.sqrt(one @ one + 1e-6), asked / math.sqrt(asked @ asked + 1e-6)
            s = before[slot, h] * decay
            s = s + beta * torch.outer(value[h] - s @ one, one)
            torch.testing.assert_close(out[row, h].double(), s @ asked * k**-0.5, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(arguments[6][slot, h].double(), s, rtol=1e-4, atol=1e-5)
        shifted = torch.cat([history[slot, :, 1 : taps - 1], x[row][:, None]], dim=1)
        assert torch.equal(arguments[5][slot, :, : taps - 1].double(), shifted)
    assert not out[1].any()
    assert torch.equal(arguments[6][0].double(), before[0]) and torch.equal(arguments[5][0].double(), history[0])


SHAPE = st.fixed_dictionaries(
    {
        "hk": st.integers(1, 2),
        "group": st.integers(1, 3),
        "k": st.sampled_from([4, 7, 16]),
        "v": st.sampled_from([1, 8, 19]),
        "seed": st.integers(0, 2**31),
        "state_dtype": st.sampled_from(["float32", "bfloat16"]),
        "bias": st.booleans(),
        "activation": st.sampled_from(["silu", None]),
    }
)
ENGINE = {"plain": True, "transposed": False}
LAYOUT = st.fixed_dictionaries({"taps": st.integers(2, 5), "transposed": st.booleans(), "channels_last": st.booleans()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", PROVIDERS)
@harness.examples(4)
@given(
    data=st.data(),
    shape=SHAPE,
    layout=LAYOUT,
)
def test_every_provider(
    provider: str, dtype: str, data: st.DataObject, shape: dict[str, Any], layout: dict[str, Any]
) -> None:
    if provider == "engine":
        layout = layout | ENGINE
    padding = data.draw(st.lists(st.sampled_from([0, -1]), max_size=2), label="padding")
    real = data.draw(st.lists(st.integers(1, 7), unique=True, max_size=3), label="slots")
    arguments = Inputs(data.draw(st.permutations(real + padding)), dtype=dtype, **shape, **layout).arguments
    assume(registry.supports(GDN_DECODE, provider, arguments).ok)
    widest = dtype if shape["state_dtype"] == "float32" else shape["state_dtype"]
    harness.check(GDN_DECODE, provider, arguments, tolerance=TOLERANCE[widest])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", harness.providers(GDN_VERIFY))
@harness.examples(4)
@given(data=st.data(), shape=SHAPE, layout=LAYOUT)
def test_every_provider_verifies(
    provider: str, dtype: str, data: st.DataObject, shape: dict[str, Any], layout: dict[str, Any]
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3), label="lengths")
    padded = data.draw(st.lists(st.sampled_from([None, None, 0, -1]), min_size=3, max_size=3), label="padding")
    outside = data.draw(st.integers(0, 1), label="outside")
    if provider == "engine":
        layout = layout | ENGINE | {"extra_places": 1}
    flat = data.draw(st.permutations(range(1, 8)), label="slots")
    slots = [flat[2 * i : 2 * i + 2] if padded[i] is None else [padded[i]] * 2 for i in range(len(lengths))]
    accepted = data.draw(st.lists(st.integers(1, 2), min_size=len(lengths), max_size=len(lengths)), label="accepted")
    inputs = Inputs([1] * (sum(lengths) + 2 * outside), dtype=dtype, **shape, **layout)
    cu = [outside + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    arguments = inputs.drafts(cu, slots, accepted)
    assume(registry.supports(GDN_VERIFY, provider, arguments).ok)
    widest = dtype if shape["state_dtype"] == "float32" else shape["state_dtype"]
    harness.check(GDN_VERIFY, provider, arguments, tolerance=TOLERANCE[widest])


@pytest.mark.parametrize("provider", harness.providers(GDN_VERIFY))
@pytest.mark.parametrize("sequences", [0, 2])
def test_no_drafted_row(provider: str, sequences: int) -> None:
    slots = [[1 + 2 * i, 2 + 2 * i] for i in range(sequences)]
    arguments = Inputs([]).drafts([0] * (sequences + 1), slots, [1] * sequences)
    harness.check(GDN_VERIFY, provider, arguments, tolerance=TOLERANCE["float32"])


def test_verified_drafts_equal_decoded_rows() -> None:
    """Two drafts, the first accepted in part: outputs and the last state equal one decode step after the other."""
    inputs = Inputs([1] * 5, taps=4)
    decoded, verified = (contract.clones(inputs.arguments) for _ in range(2))
    x, a, b, weight, bias, conv, state, _, log, dt = verified[:10]
    state[3], conv[3] = state[1], conv[1]
    names = {"conv_weight": weight, "conv_bias": bias, "A_log": log, "dt_bias": dt}
    slots, device = torch.tensor([[1, 2, 3]], device=harness.DEVICE), harness.DEVICE
    pools = {"conv_state": conv, "ssm_state": state, "slots": slots, **names}
    outs: list[Tensor] = []
    for first, last, kept, accepted in ((0, 3, 2, 1), (2, 5, 3, 2)):
        rows = slice(first, last)
        y = gdn_verify(
            x[rows], a[rows], b[rows], cu_seqlens=torch.tensor([0, last - first], device=device),
            num_accepted=torch.tensor([accepted], device=device), **pools,
        )  # fmt: skip
        outs.append(y[:kept])
    pools = {"conv_state": decoded[5], "ssm_state": decoded[6], "slots": slots[:, 0], **names}
    steps = [gdn_decode(x[i : i + 1], a[i : i + 1], b[i : i + 1], **pools) for i in range(5)]
    torch.testing.assert_close(torch.cat(outs), torch.cat(steps), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[3], decoded[6][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_served_shape(provider: str, rows: int, state_dtype: str) -> None:
    """Keys and values of 128, in several strips, as the GPU runs them."""
    arguments = Inputs(
        [*range(1, rows + 1)], hk=1, group=2, k=128, v=32, plain=True, dtype="bfloat16", state_dtype=state_dtype
    ).arguments
    if provider == "engine" and not rows:
        assert not registry.supports(GDN_DECODE, provider, arguments).ok
        return
    harness.check(GDN_DECODE, provider, arguments, tolerance=TOLERANCE["bfloat16"])


@pytest.mark.skipif(not harness.GPU, reason="programmatic dependent launch is a GPU's")
def test_an_early_launch_changes_no_bit() -> None:
    """The second kernel begins while the first runs, and must not read what that one still writes."""
    results = []
    for early in (False, True):
        arguments = Inputs([*range(1, 65)], hk=16, group=2, k=128, v=128, plain=True, pool=65).arguments
        strip, warps, _ = _decode_triton.config(arguments[6])
        with mock.patch.object(_decode_triton, "config", lambda *_, way=(strip, warps, early): way):
            outs = [_decode_triton.gdn_decode(*arguments) for _ in range(100)]
        results.append((*outs, arguments[5], arguments[6]))
    for plain, begun in zip(*results, strict=True):
        assert torch.equal(plain, begun)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_padding(provider: str, transposed: bool) -> None:
    """Rows of padding between real ones."""
    inputs = Inputs([3, 0, 1, -1], k=7, v=9, transposed=transposed, plain=provider == "engine")
    harness.check(GDN_DECODE, provider, inputs.arguments, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", harness.providers(GDN_VERIFY))
@pytest.mark.parametrize("transposed", [False, True])
def test_drafts_of_padding(provider: str, transposed: bool) -> None:
    """Between real ones."""
    inputs = Inputs([1] * 4, k=7, v=9, transposed=transposed, plain=provider == "engine", extra_places=1)
    drafts = inputs.drafts([0, 2, 3, 4], [[1, 2], [0, 0], [4, 3]], [2, 1, 1])
    harness.check(GDN_VERIFY, provider, drafts, tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_slot_zero_is_real_where_no_slot_is_null(provider: str) -> None:
    arguments = Inputs([0, 3], plain=provider == "engine").arguments
    harness.check(GDN_DECODE, provider, (*arguments[:-1], None), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_far_gates(provider: str) -> None:
    """Where softplus and sigmoid are 0, 1, or the argument itself."""
    arguments = Inputs([1, 2, 3], plain=True, hk=1, group=2).arguments
    arguments[1].copy_(torch.tensor([[-60.0, 60.0], [0.0, 1e4], [-1e4, 3.0]]))
    arguments[2].copy_(torch.tensor([[-200.0, 200.0], [0.0, 1e4], [-1e4, 3.0]]))
    harness.check(GDN_DECODE, provider, arguments, tolerance=TOLERANCE["float32"])


def test_as_torch_sees_it() -> None:
    harness.opcheck(GDN_DECODE, Inputs([1, 0, 3]).arguments)
    harness.opcheck(GDN_VERIFY, Inputs([1] * 3).drafts([0, 2, 3], [[1, 2], [3, 4]], [1, 2]))


def test_triton_refuses_what_it_cannot_compute() -> None:
    arguments = Inputs([1, 2]).arguments
    verdict = registry.supports(GDN_DECODE, "triton", (arguments[0].double(), *arguments[1:]))
    assert not verdict.ok and "float64" in verdict.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 60)}, "60 channels"),
        ({1: torch.zeros(2, 3)}, "a and b"),
        ({3: torch.zeros(64, 1)}, "conv_weight"),
        ({4: torch.zeros(3)}, "conv_bias"),
        ({5: torch.zeros(8, 64, 2)}, "conv_state"),
        ({6: torch.zeros(8, 4, 8)}, "ssm_state"),
        ({7: torch.zeros(3, dtype=torch.int32)}, "slots"),
        ({8: torch.zeros(3)}, "A_log"),
        ({12: "gelu"}, "activation"),
    ],
)
def test_wrong_arguments_are_named(change: dict[int, Any], message: str) -> None:
    given = [change.get(i, value) for i, value in enumerate(Inputs([1, 2]).arguments)]
    names = ("conv_weight", "conv_bias", "conv_state", "ssm_state", "slots", "A_log", "dt_bias", "scale", "eps")
    with pytest.raises(ValueError, match=message):
        gdn_decode(*given[:3], **dict(zip((*names, "activation", "null_slot"), given[3:], strict=True)))


@pytest.mark.parametrize("change", [{8: torch.ones(2, dtype=torch.int32)}, {9: torch.ones(1, dtype=torch.int32)}])
def test_wrong_drafts_are_named(change: dict[int, Tensor]) -> None:
    drafts = Inputs([1] * 3).drafts([0, 2, 3], [[1, 2], [3, 4]], [1, 2])
    given: list[Any] = [change.get(i, value) for i, value in enumerate(drafts)]
    names = ("conv_weight", "conv_bias", "conv_state", "ssm_state", "cu_seqlens", "slots", "num_accepted")
    names += ("A_log", "dt_bias", "scale", "eps", "activation", "null_slot")
    with pytest.raises(ValueError, match="slots must be"):
        gdn_verify(*given[:3], **dict(zip(names, given[3:], strict=True)))
