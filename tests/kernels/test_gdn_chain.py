"""`gdn_prefill` and `gdn_prefill_segment`: the reference against the formula, every provider against the reference."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.contract import clones
from atom_patches.kernels.gdn_chain.prefill import GDN_PREFILL, GDN_PREFILL_SEGMENT, TOLERANCE, gdn_prefill

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROVIDERS = harness.providers(GDN_PREFILL)
SEGMENT = harness.providers(GDN_PREFILL_SEGMENT)
# Every combination is compiled on a GPU, so they are few.
SHAPES = [
    {"key_heads": 1, "group": 2, "key": 16, "value": 16, "taps": 4, "bias": True, "value_major": True},
    {"key_heads": 2, "group": 1, "key": 20, "value": 7, "taps": 3, "bias": False, "value_major": False},
    {"key_heads": 1, "group": 1, "key": 16, "value": 33, "taps": 2, "bias": True, "value_major": False},
]
NAMES = (
    "mixed_qkv", "a", "b", "conv_weight", "conv_bias", "conv_state", "ssm_state", "slots", "has_initial_state",
    "cu_seqlens", "A_log", "dt_bias", "scale", "eps", "activation", "null_slot",
)  # fmt: skip


def draw(
    lengths: list[int], slots: list[int] | None = None, *, key_heads: int = 1, group: int = 2, key: int = 16,
    value: int = 16, taps: int = 4, bias: bool = True, seed: int = 0, dtype: str = "float32", padded: bool = False,
    value_major: bool = True, resumed: list[bool] | None = None, decay: float = 0.05,
) -> dict[str, Any]:  # fmt: skip
    """Random arguments. With `padded`, rows that no sequence owns and memory between rows hold NaN, and slots have
    room for more past inputs than the filter takes; slots that no sequence uses hold NaN."""
    gen, kind, count = torch.Generator().manual_seed(seed), DTYPES[dtype], len(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    before, after = (2, 3) if padded else (0, 0)
    total, heads = before + sum(lengths) + after, key_heads * group
    channels = 2 * key_heads * key + heads * value
    wide = torch.full((total, channels + (6 if padded else 0)), torch.nan)
    mixed = wide[:, 2 : 2 + channels] if padded else wide
    mixed[before : total - after] = normal(sum(lengths), channels)
    slots = list(range(1, count + 1)) if slots is None else slots
    used = [slot for slot in slots if slot > 0]
    pool, past = max([0, *used]) + 2, taps - 1 + (2 if padded else 0)
    conv_state = torch.full((pool, past, channels), torch.nan)
    ssm_state = torch.full((pool, heads, value, key), torch.nan)
    conv_state[used], ssm_state[used] = normal(len(used), past, channels), normal(len(used), heads, value, key)
    if not value_major:
        ssm_state = ssm_state.mT.contiguous().mT
    wide = wide.to(harness.DEVICE, kind)
    found: dict[str, Any] = {
        "mixed_qkv": wide[:, 2 : 2 + channels] if padded else wide,
        "a": normal(total, heads).to(kind),
        "b": normal(total, heads).to(kind),
        "conv_weight": (normal(channels, taps) * taps**-0.5).to(kind),
        "conv_bias": normal(channels).to(kind) if bias else None,
        "conv_state": conv_state.to(harness.DEVICE, kind).mT,
        "ssm_state": ssm_state.to(harness.DEVICE),
        "slots": torch.tensor(slots, dtype=torch.int32),
        "has_initial_state": torch.tensor([i % 2 == 0 for i in range(count)] if resumed is None else resumed),
        "cu_seqlens": torch.tensor([before, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "A_log": torch.rand(heads, generator=gen).mul(decay).add(1e-3).log(),
        "dt_bias": torch.rand(heads, generator=gen),
        "scale": key**-0.5,
        "eps": 1e-6,
        "activation": "silu",
        "null_slot": 0,
    }
    return on_device(found)


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(harness.DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def in_order(arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments[name] for name in NAMES)


def segment_of(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """The same call's arguments to `gdn_prefill_segment`."""
    heads, value_size, key_size = arguments["ssm_state"].shape[1:]
    key_heads = (arguments["mixed_qkv"].shape[1] - heads * value_size) // (2 * key_size)
    names = [name for name in NAMES if name not in ("ssm_state", "scale", "eps", "activation", "null_slot")]
    rest = (arguments[name] for name in ("eps", "activation", "null_slot"))
    return *(arguments[name] for name in names), key_heads, key_size, *rest


def served(provider: str) -> str:
    """The strictest dtype that the provider serves."""
    return "bfloat16" if provider == "engine" else "float32"


def check(provider: str, arguments: dict[str, Any], dtype: str | None = None) -> None:
    harness.check(GDN_PREFILL, provider, in_order(arguments), tolerance=TOLERANCE[dtype or served(provider)])


def oracle(x: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Output, convolution states and recurrent states in float64, one token after the other."""
    mixed, weight, bias = x["mixed_qkv"].double(), x["conv_weight"].double(), x["conv_bias"].double()
    conv, ssm = x["conv_state"].double(), x["ssm_state"].double()
    heads, value, key = ssm.shape[1:]
    keys, taps = (mixed.shape[1] - heads * value) // 2, weight.shape[1]
    group = heads * key // keys
    out = torch.zeros(mixed.shape[0], heads, value, dtype=torch.float64)
    bounds = x["cu_seqlens"].tolist()
    for i, slot in enumerate(x["slots"].tolist()):
        if slot <= 0 or bounds[i] == bounds[i + 1]:
            continue
        past = conv[slot] if x["has_initial_state"][i] else torch.zeros_like(conv[slot])
        state = ssm[slot] if x["has_initial_state"][i] else torch.zeros_like(ssm[slot])
        past, state = past.clone(), state.clone()
        for t in range(bounds[i], bounds[i + 1]):
            past = torch.cat([past, mixed[t][:, None]], dim=1)
            y = (past[:, -taps:] * weight).sum(1) + bias
            past = past[:, 1:]
            y = y / (1 + torch.exp(-y))
            q, k = y[:keys].view(-1, key), y[keys : 2 * keys].view(-1, key)
            q, k = (z / (z.square().sum(-1, keepdim=True) + x["eps"]).sqrt() for z in (q, k))
            v = y[2 * keys :].view(heads, value)
            decay = torch.exp(
                -x["A_log"].double().exp() * torch.log1p(torch.exp(x["a"][t].double() + x["dt_bias"].double()))
            )
            beta = 1 / (1 + torch.exp(-x["b"][t].double()))
            for h in range(heads):
                state[h] *= decay[h]
                state[h] += beta[h] * torch.outer(v[h] - state[h] @ k[h // group], k[h // group])
                out[t, h] = x["scale"] * (state[h] @ q[h // group])
        conv[slot], ssm[slot] = past, state
    return out, conv, ssm


def test_the_reference_is_the_formula() -> None:
    drawn = draw([5, 0, 1, 2, 9], [3, 6, 1, 5, 2], key_heads=2, key=4, value=3, seed=1, padded=False)
    x: dict[str, Any] = {name: y.cpu() if isinstance(y, Tensor) else y for name, y in drawn.items()}
    want, conv, ssm = oracle(x)
    got = gdn_prefill(**x)
    for found, expected in ((got, want), (x["conv_state"], conv), (x["ssm_state"], ssm)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@harness.examples(4)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 65, 100]), min_size=1, max_size=4),
    data=st.data(),
    shape=st.sampled_from(SHAPES),
    decay=st.sampled_from([0.05, 5.0]),
    seed=st.integers(0, 2**31),
)
def test_every_provider(
    provider: str, dtype: str, lengths: list[int], data: st.DataObject, shape: dict[str, Any], decay: float, seed: int
) -> None:
    real = data.draw(st.lists(st.integers(1, 9), unique=True, min_size=len(lengths), max_size=len(lengths)))
    slots = [data.draw(st.sampled_from([slot, slot, slot, 0, -1])) for slot in real]
    resumed = [data.draw(st.booleans()) for _ in lengths]
    x = draw(lengths, slots, seed=seed, dtype=dtype, padded=True, resumed=resumed, decay=decay, **shape)
    check(provider, x, dtype)
    if registry.available(GDN_PREFILL_SEGMENT, provider, harness.DEVICE).ok:
        harness.check(GDN_PREFILL_SEGMENT, provider, segment_of(x), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("provider", SEGMENT)
@pytest.mark.parametrize("cut", [2, 33])
def test_segments_tell_what_prefill_does_to_states(provider: str, cut: int) -> None:
    """A prompt in two segments: their pairs, from inputs alone, give the state that prefill leaves."""
    x = draw([cut, 70 - cut], [2, 1], resumed=[True, True], seed=7)
    x["conv_state"][1] = x["mixed_qkv"][:cut].T[:, -3:] if cut >= 3 else torch.cat(
        [x["conv_state"][2][:, cut:], x["mixed_qkv"][:cut].T], dim=1
    )  # fmt: skip
    ends, maps = registry.implementation(GDN_PREFILL_SEGMENT, provider)(*segment_of(x))
    state = x["ssm_state"][2].clone()
    for i in range(2):
        state = ends[i] + state @ maps[i]
    whole = x | on_device({"cu_seqlens": torch.tensor([0, 70]).int(), "slots": torch.tensor([2]).int()})
    whole["has_initial_state"] = whole["has_initial_state"][:1]
    gdn_prefill(**whole)
    torch.testing.assert_close(state, whole["ssm_state"][2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_half_precision_rows(provider: str, dtype: str) -> None:
    check(provider, draw([66, 1, 3], key=64, value=64, dtype=dtype, padded=False), dtype)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_sizes_that_are_no_powers_of_two(provider: str) -> None:
    """Both fill up to 32: what vLLM's kernels serve, too."""
    check(provider, draw([5, 66], key=20, value=30, seed=8, dtype=served(provider)))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "change",
    [{"has_initial_state": None}, {"activation": None}, {"null_slot": None, "slots": torch.tensor([0, 2])}],
    ids=["no initial states", "no activation", "no null slot"],
)
def test_what_may_be_left_out(provider: str, change: dict[str, Any]) -> None:
    x = draw([5, 34], [1, 2], seed=3, dtype=served(provider)) | on_device(change)
    x["ssm_state"].nan_to_num_(0.5)
    x["conv_state"].nan_to_num_(0.5)
    check(provider, x)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_many_sequences_with_single_rows_among_them(provider: str) -> None:
    lengths = [1, 0, 1, 2] * 11 + [70]
    check(provider, draw(lengths, seed=4, dtype=served(provider)))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_padding_and_rows_that_no_sequence_owns(provider: str) -> None:
    for lengths in ([3, 5, 66, 4], [0, 0, 0, 0]):
        check(provider, draw(lengths, [1, 0, 2, -1], padded=True, dtype=served(provider)))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", ["conv_bias", "slots", "has_initial_state", "cu_seqlens", "A_log", "dt_bias"])
def test_vectors_with_other_values_in_between(provider: str, name: str) -> None:
    x = draw([9, 11], [2, 1], resumed=[True, True], seed=5, dtype=served(provider))
    x[name] = harness.spread(x[name])
    check(provider, x)
    if registry.available(GDN_PREFILL_SEGMENT, provider, harness.DEVICE).ok:
        harness.check(GDN_PREFILL_SEGMENT, provider, segment_of(x), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_rows(provider: str, lengths: list[int]) -> None:
    x = draw(lengths, dtype=served(provider))
    check(provider, x)
    harness.check(GDN_PREFILL_SEGMENT, provider, segment_of(x), tolerance=(0.0, 0.0))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_but_no_sequence(provider: str) -> None:
    check(provider, draw([], padded=True, dtype=served(provider)))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_pieces_of_a_prompt_give_what_the_whole_gives(provider: str) -> None:
    """Prefill in three steps over the same slots, cut where a piece is shorter than the filter's memory."""
    x = draw([70], [2], resumed=[False], seed=6, dtype=served(provider))
    rtol, atol = (1e-4, 1e-5) if provider != "engine" else TOLERANCE["bfloat16"]
    whole, pieces = clones(in_order(x)), clones(in_order(x))
    call = registry.implementation(GDN_PREFILL, provider)
    expected = call(*whole)
    parts = []
    for i, (start, stop) in enumerate(((0, 2), (2, 35), (35, 70))):
        piece: dict[str, Any] = dict(zip(NAMES, pieces, strict=True))
        piece |= {name: piece[name][start:stop] for name in ("mixed_qkv", "a", "b")}
        piece["cu_seqlens"] = torch.tensor([0, stop - start], dtype=torch.int32, device=harness.DEVICE)
        piece["has_initial_state"] = torch.tensor([i > 0], device=harness.DEVICE)
        parts.append(call(*in_order(piece)))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=rtol, atol=atol)
    for name in ("conv_state", "ssm_state"):
        at = NAMES.index(name)
        torch.testing.assert_close(pieces[at][2], whole[at][2], rtol=rtol, atol=atol)


def test_as_torch_sees_it() -> None:
    x = draw([5, 3], [2, 1], dtype="bfloat16", value_major=False)
    for name in ("conv_state", "ssm_state"):
        x[name].nan_to_num_(0.0)
    harness.opcheck(GDN_PREFILL, in_order(x))
    harness.opcheck(GDN_PREFILL_SEGMENT, segment_of(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixed_qkv": torch.zeros(4, 63)}, "63 channels"),
        ({"a": torch.zeros(4, 3)}, "a and b must be"),
        ({"conv_weight": torch.zeros(64, 1)}, "conv_weight must be"),
        ({"conv_bias": torch.zeros(63)}, "conv_bias must be"),
        ({"conv_state": torch.zeros(3, 64, 2)}, "conv_state must be"),
        ({"ssm_state": torch.zeros(3, 2, 16)}, "ssm_state must be"),
        ({"slots": torch.tensor([1, 2])}, "slots must be"),
        ({"has_initial_state": torch.tensor([True, False])}, "has_initial_state must be"),
        ({"A_log": torch.zeros(3)}, "A_log and dt_bias"),
        ({"activation": "relu"}, "activation must be"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gdn_prefill(**draw([4]) | on_device(change))


def test_what_triton_does_not_serve() -> None:
    triton = pytest.importorskip("atom_patches.kernels.gdn_chain.triton_impl")
    x = draw([3], key=256, value=4, group=1)
    assert "state of 256 keys" in triton.supports_gdn_prefill(*in_order(x)).reason
    assert "float64" in triton.supports_gdn_prefill(*in_order(x | {"mixed_qkv": x["mixed_qkv"].double()})).reason
