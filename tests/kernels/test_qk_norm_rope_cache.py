"""From projection to attention: the formula in float64, head by head and pair by pair, and every provider against the
reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atom_patches.kernels import registry
from atom_patches.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE, TOLERANCE, qk_norm_rope_cache

PROVIDERS = harness.providers(QK_NORM_ROPE_CACHE)
OURS = [name for name in PROVIDERS if name in ("torch", "triton")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIGHT = TOLERANCE | {
    "bfloat16": (8e-3, 1e-3),
    "float16": (1e-3, 1e-4),
    "float8_e4m3fn": (0.13, 4e-3),
    "float8_e4m3fnuz": (0.13, 4e-3),
}
"""For those that round once."""
POSITIONS = 40


@dataclass(frozen=True)
class Setting:
    """What a call is drawn from; see `call`."""

    tokens: int = 3
    q_heads: int = 4
    kv_heads: int = 2
    size: int = 24
    rotary: int = 12
    dtype: str = "float32"
    norms: tuple[bool, bool] = (True, True)
    gemma: bool = False
    gated: bool = True
    neox: bool = True
    mrope: str | None = None
    cache: str | None = "same"
    scaled: bool = True
    layout: str = "NHD"
    slots: tuple[int, ...] | None = None
    integers: torch.dtype = torch.int64
    seed: int = 0


BLOCKS, BLOCK_SIZE = 5, 6


def call(setting: Setting) -> tuple[Any, ...]:
    """The operator's arguments; every tensor lies in a larger one that holds NaN around it."""
    s, gen = setting, torch.Generator().manual_seed(setting.seed)
    dtype, device = DTYPES[s.dtype], harness.DEVICE

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, kind)

    def inside(values: Tensor) -> Tensor:
        wide = values.new_full((values.shape[0] + 2, values.shape[1] + 16), float("nan"))
        part = wide[1:-1, 8:-8]
        part.copy_(values)
        return part

    qkv = inside(normal(s.tokens, (s.q_heads * (2 if s.gated else 1) + 2 * s.kv_heads) * s.size))
    positions = table = None
    if s.rotary:
        shape = (3, s.tokens) if s.mrope else (s.tokens,)
        positions = torch.randint(0, POSITIONS, shape, generator=gen).to(device, s.integers)
        angles = 3 * torch.randn(POSITIONS, s.rotary // 2, generator=gen)
        table = torch.cat([angles.cos(), angles.sin()], 1).to(device, dtype)
    weights = [normal(s.size) if asked else None for asked in s.norms]
    caches: list[Tensor | None] = [None, None]
    scales: list[Tensor | None] = [None, None]
    slots = None
    if s.cache is not None:
        kind = dtype if s.cache == "same" else getattr(torch, s.cache)
        shape = {
            "NHD": (2, BLOCKS, BLOCK_SIZE, s.kv_heads, s.size),
            "HND": (2, BLOCKS, s.kv_heads, BLOCK_SIZE, s.size),
            "beside each other": (BLOCKS, 2, BLOCK_SIZE, s.kv_heads, s.size),
        }[s.layout]
        both = normal(*shape).to(kind)
        if s.layout == "HND":
            both = both.transpose(2, 3)
        caches = list(both.unbind(1 if s.layout == "beside each other" else 0))
        drawn = torch.randperm(BLOCKS * BLOCK_SIZE, generator=gen)[: s.tokens] if s.slots is None else s.slots
        slots = torch.as_tensor(drawn).to(device, s.integers)
        if s.cache != "same" and s.scaled:
            scales = [torch.tensor([value], device=device) for value in (0.3, 1.7)]
    height, width = s.rotary // 6, s.rotary // 8
    section = [s.rotary // 2 - height - width, height, width] if s.mrope else None
    return (
        qkv, positions, table, *weights, *caches, slots, *scales, s.q_heads, s.kv_heads, s.size, 1e-3, s.gemma, s.gated,
        s.neox, section, s.mrope == "interleaved",
    )  # fmt: skip


def tolerance(setting: Setting, provider: str) -> tuple[float, float]:
    stated = TIGHT if provider in OURS else TOLERANCE
    return max(stated[name] for name in (setting.dtype, setting.cache or "same") if name in stated)


def check(provider: str, setting: Setting) -> None:
    arguments = call(setting)
    if provider == "engine" and not registry.supports(QK_NORM_ROPE_CACHE, provider, arguments).ok:
        return
    harness.check(QK_NORM_ROPE_CACHE, provider, arguments, tolerance=tolerance(setting, provider))


def skip_unless_convertible(provider: str, cache: str) -> None:
    if provider in ("triton", "engine") and cache == "float8_e4m3fnuz" and torch.version.hip is None:
        pytest.skip("only AMD's GPUs have this type")


def expected_head(values: list[float], weight: list[float] | None, angles: list[float], s: Setting) -> list[float]:
    """One head by the formulas; `angles` has one entry a pair."""
    if weight is not None:
        root = math.sqrt(math.fsum(v * v for v in values) / len(values) + 1e-3)
        values = [v / root * (w + (1 if s.gemma else 0)) for v, w in zip(values, weight, strict=True)]
    out = list(values)
    for i, angle in enumerate(angles):
        a, b = (i, i + len(angles)) if s.neox else (2 * i, 2 * i + 1)
        turned = complex(values[a], values[b]) * complex(math.cos(angle), math.sin(angle))
        out[a], out[b] = turned.real, turned.imag
    return out


def axis_of(i: int, section: list[int], interleaved: bool) -> int:
    """Which of the three positions angle i takes."""
    if interleaved:
        return i % 3 if i % 3 and i < 3 * section[i % 3] else 0
    return next(axis for axis in range(3) if i < sum(section[: axis + 1]))


def angles_of(
    token: int, positions: Tensor | None, table: Tensor | None, section: Any, interleaved: bool
) -> list[float]:
    if positions is None or table is None:
        return []
    half, found = table.shape[1] // 2, []
    for i in range(half):
        row = positions[axis_of(i, section, interleaved)] if positions.dim() == 2 else positions
        cos, sin = float(table[int(row[token]), i]), float(table[int(row[token]), half + i])
        found.append(math.atan2(sin, cos))
    return found


def settings() -> st.SearchStrategy[Setting]:
    """Calls of every kind; the slots may be fewer than the tokens, and some are padding."""

    def whole(s: Setting, half: int, kept: list[bool]) -> Setting:
        places = range(0, 4 * s.tokens, 4)
        slots = tuple(place if keep else -1 - place for place, keep in zip(places, kept, strict=False))
        return replace(s, rotary=2 * min(half, s.size // 2), slots=slots)

    plain = st.builds(
        Setting,
        tokens=st.integers(0, 5),
        q_heads=st.integers(1, 5),
        kv_heads=st.integers(1, 3),
        size=st.sampled_from([2, 8, 24, 32]),
        norms=st.tuples(st.booleans(), st.booleans()),
        gemma=st.booleans(),
        gated=st.booleans(),
        neox=st.booleans(),
        mrope=st.sampled_from([None, "interleaved", "in blocks"]),
        cache=st.sampled_from([None, "same", "float8_e4m3fn"]),
        scaled=st.booleans(),
        layout=st.sampled_from(["NHD", "HND", "beside each other"]),
        integers=st.sampled_from([torch.int32, torch.int64]),
        seed=st.integers(0, 2**31),
    )
    return st.builds(whole, plain, st.sampled_from([0, 1, 3, 6, 16]), st.lists(st.booleans(), max_size=5))


@harness.examples(4 if harness.GPU else 40)
@given(setting=settings())
def test_the_reference_is_the_formula(setting: Setting) -> None:
    s = replace(setting, cache=setting.cache and "same")
    arguments = call(s)
    given_here = tuple(a.clone().cpu() if isinstance(a, Tensor) else a for a in arguments)
    qkv, positions, table, q_weight, k_weight, old_keys, old_values, slots = given_here[:8]
    section, interleaved = arguments[-2:]
    q, k, gate = (out.cpu() for out in QK_NORM_ROPE_CACHE(*arguments))
    key_cache, value_cache = (cache if cache is None else cache.cpu() for cache in arguments[5:7])
    step = s.size * (2 if s.gated else 1)
    assert gate.shape[0] == (s.tokens if s.gated else 0)
    kept = {} if slots is None else {int(slot): token for token, slot in enumerate(slots) if slot >= 0}
    for t in range(s.tokens):
        row, angles = qkv[t].double().tolist(), angles_of(t, positions, table, section, interleaved)
        for h in range(s.q_heads + s.kv_heads):
            is_key = h >= s.q_heads
            start = s.q_heads * step + (h - s.q_heads) * s.size if is_key else h * step
            weight = k_weight if is_key else q_weight
            factors = None if weight is None else weight.double().tolist()
            want = expected_head(row[start : start + s.size], factors, angles, s)
            got = k[t, h - s.q_heads] if is_key else q[t, h]
            assert got.tolist() == pytest.approx(want, rel=1e-4, abs=1e-5)
            if s.gated and not is_key:
                assert gate[t, h].tolist() == row[start + s.size : start + step]
    if key_cache is None or value_cache is None:
        return
    for slot in range(BLOCKS * BLOCK_SIZE):
        block, place = divmod(slot, BLOCK_SIZE)
        found = key_cache[block, place], value_cache[block, place]
        if slot not in kept:
            assert torch.equal(found[0], old_keys[block, place])
            assert torch.equal(found[1], old_values[block, place])
            continue
        assert torch.equal(found[0], k[kept[slot]])
        values = qkv[kept[slot], -s.kv_heads * s.size :].unflatten(0, (s.kv_heads, s.size))
        assert torch.equal(found[1], values)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@harness.examples(2 if harness.GPU else 7)  # nearly each of them compiles a kernel
@given(setting=settings())
def test_every_provider(provider: str, dtype: str, setting: Setting) -> None:
    check(provider, replace(setting, dtype=dtype))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("mrope", [None, "interleaved", "in blocks"])
def test_every_rotation(provider: str, neox: bool, mrope: str | None) -> None:
    check(provider, Setting(tokens=6, rotary=24, neox=neox, mrope=mrope, dtype="bfloat16"))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("mrope", [None, "interleaved"])
def test_the_heads_of_a_served_model(provider: str, mrope: str | None) -> None:
    shape = Setting(tokens=2, q_heads=16, kv_heads=2, size=256, rotary=64, dtype="bfloat16", gemma=True, mrope=mrope)
    check(provider, shape)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("gated", [False, True])
def test_many_tokens_share_programs_of_several_heads(provider: str, gated: bool) -> None:
    slots = (*range(20), -1, *range(21, 30))
    check(provider, Setting(tokens=66, q_heads=5, kv_heads=3, size=512, rotary=6, gated=gated, slots=slots))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "beside each other"])
@pytest.mark.parametrize("cache", ["same", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_every_cache(provider: str, layout: str, cache: str) -> None:
    skip_unless_convertible(provider, cache)
    check(provider, Setting(tokens=5, layout=layout, cache=cache, dtype="bfloat16", slots=(29, 0, -1, 7, 6)))


@pytest.mark.parametrize("provider", OURS)
def test_each_cache_at_strides_of_its_own(provider: str) -> None:
    arguments = list(call(Setting(tokens=4, slots=(29, 0, 8, 13))))
    arguments[6] = call(Setting(layout="HND"))[6]
    harness.check(QK_NORM_ROPE_CACHE, provider, tuple(arguments), tolerance=TIGHT["float32"])


@pytest.mark.parametrize("provider", OURS)
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_scaled_cache_holds_the_rounded_key_to_the_bit(provider: str, cache: str, scaled: bool) -> None:
    skip_unless_convertible(provider, cache)
    arguments = call(Setting(tokens=4, cache=cache, scaled=scaled, dtype="bfloat16", slots=(3, 2, 1, 0)))
    qkv, *_, k_weight, key_cache, value_cache, _, k_scale, v_scale = arguments[:10]
    k_weight[:4] = torch.tensor([500.0, -500.0, 1e-3, -1e-4])
    qkv[:, -4:] = torch.tensor([1e4, -1e4, 1e-3, 0.0], dtype=torch.bfloat16)
    _, k, _ = registry.implementation(QK_NORM_ROPE_CACHE, provider)(*arguments)
    values = qkv[:, -48:].unflatten(1, (2, 24))
    largest = torch.finfo(key_cache.dtype).max
    for stored, given_values, scale in ((key_cache, k, k_scale), (value_cache, values, v_scale)):
        quotient = given_values.float() / (1.0 if scale is None else scale)
        want = quotient.clamp(-largest, largest).to(key_cache.dtype)
        got = stored[0, :4].flip(0)
        assert torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("provider", OURS)
def test_padding_and_surplus_tokens_are_written_nowhere(provider: str) -> None:
    arguments = call(Setting(tokens=5, slots=(-1, 4, -7)))
    before = [cache.clone() for cache in arguments[5:7]]
    q, k, gate = registry.implementation(QK_NORM_ROPE_CACHE, provider)(*arguments)
    assert all(torch.isfinite(out).all() for out in (q, k, gate)), "their outputs are computed"
    for old, new in zip(before, arguments[5:7], strict=True):
        changed = (old != new).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[0, 4]]


@pytest.mark.parametrize("provider", OURS)
def test_a_cache_of_more_than_two_billion_values(provider: str) -> None:
    arguments = list(call(Setting(tokens=2, slots=(1, 25), dtype="bfloat16", integers=torch.int32)))
    stride = 2**29 + 64  # an int32, which four times itself is not
    memory = torch.empty(4 * stride + 6 * 96, dtype=torch.bfloat16, device=harness.DEVICE)  # untouched: not resident
    arguments[5] = memory.as_strided((5, 6, 2, 24), (stride, 48, 24, 1))
    arguments[6] = memory.as_strided((5, 6, 2, 24), (stride, 48, 24, 1), 6 * 48)
    _, k, _ = registry.implementation(QK_NORM_ROPE_CACHE, provider)(*arguments)
    values = arguments[0][:, -48:]
    for token, place in enumerate((48, 4 * stride + 48)):
        assert torch.equal(memory[place : place + 48], k[token].flatten())
        assert torch.equal(memory[place + 6 * 48 : place + 7 * 48], values[token])


def test_what_the_function_returns() -> None:
    arguments = call(Setting())
    names = ("q_weight", "k_weight", "key_cache", "value_cache", "slots", "k_scale", "v_scale")
    given_tensors = dict(zip(names, arguments[3:10], strict=True))
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 24}
    q, k, v, gate = qk_norm_rope_cache(*arguments[:3], **given_tensors, **heads, gated=True, eps=1e-3)
    want = QK_NORM_ROPE_CACHE(*arguments)
    assert gate is not None
    assert all(torch.equal(a, b) for a, b in zip((q, k, gate), want, strict=True))
    assert v.untyped_storage().data_ptr() == arguments[0].untyped_storage().data_ptr()
    assert torch.equal(v.flatten(1), arguments[0][:, -48:])
    assert qk_norm_rope_cache(arguments[0], num_q_heads=8, num_kv_heads=2, head_dim=24)[3] is None


def test_one_position_for_all_three_axes_is_plain_rotation() -> None:
    plain = call(Setting(cache=None))
    for name in ("interleaved", "in blocks"):
        arguments = list(call(Setting(cache=None, mrope=name)))
        arguments[:5] = plain[:5]
        arguments[1] = plain[1].expand(3, -1)
        for found, want in zip(QK_NORM_ROPE_CACHE(*arguments), QK_NORM_ROPE_CACHE(*plain), strict=True):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setting", [Setting(), Setting(cache=None, gated=False, rotary=0), Setting(mrope="in blocks")])
def test_as_torch_sees_it(setting: Setting) -> None:
    harness.opcheck(QK_NORM_ROPE_CACHE, call(setting))


def test_what_does_not_fit_registers_or_lies_apart_is_refused_by_name() -> None:
    arguments = list(call(Setting(size=1026, rotary=2, cache=None)))
    verdict = registry.supports(QK_NORM_ROPE_CACHE, "triton", tuple(arguments))
    assert not verdict.ok and "1026" in verdict.reason
    arguments = list(call(Setting()))
    arguments[0] = arguments[0].T.contiguous().T
    verdict = registry.supports(QK_NORM_ROPE_CACHE, "triton", tuple(arguments))
    assert not verdict.ok and "qkv" in verdict.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_q_heads": 3}, r"qkv must be \[T, 240\]"),
        ({"q_weight": torch.zeros(23)}, "q_weight must be"),
        ({"k_weight": torch.zeros(24, 1)}, "k_weight must be"),
        ({"positions": None}, "positions and cos_sin_cache come together"),
        ({"cos_sin_cache": torch.zeros(4, 26)}, "cos_sin_cache must be"),
        ({"cos_sin_cache": torch.zeros(4, 5)}, "cos_sin_cache must be"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int64)}, "positions must be"),
        ({"positions": torch.zeros(3, 3, dtype=torch.int64)}, "mrope_section of three that sum up to 6"),
        ({"slots": None}, "come together"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, r"slots must be \[S\], S at most 3"),
        ({"key_cache": torch.zeros(5, 6, 3, 24)}, "key_cache must be"),
        ({"value_cache": torch.zeros(5, 7, 2, 24)}, "one shape and dtype"),
        ({"value_cache": torch.zeros(5, 6, 2, 24).half()}, "one shape and dtype"),
        ({"key_cache": torch.zeros(5, 6, 2, 24).half(), "value_cache": torch.zeros(5, 6, 2, 24).half()}, "or FP8"),
        ({"k_scale": torch.ones(1)}, "scales are for FP8 caches"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    names = ("qkv", "positions", "cos_sin_cache", "q_weight", "k_weight", "key_cache", "value_cache", "slots")
    arguments: dict[str, Any] = dict(zip(names, call(Setting()), strict=False))
    arguments |= {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 24, "gated": True} | change
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_cache(**arguments)
