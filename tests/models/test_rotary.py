"""Rotary positions as transformers turns them, in one dimension and in three."""

from __future__ import annotations

import pytest
import torch
from bench_of_steps import Bench, oracle, prompts, text_config
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoders import assert_logits

from atom_patches.models.config import read_rotary
from atom_patches.models.parts import RotaryShape
from atom_patches.models.rotary import Rotary, frequency_axes, scaled_frequencies


@given(half=st.integers(1, 32), data=st.data())
@settings(deadline=None)
def test_every_axis_has_its_frequencies(half: int, data: st.DataObject) -> None:
    height = data.draw(st.integers(0, half // 3))
    width = data.draw(st.integers(0, height))
    shape = RotaryShape(2 * half, 2 * half, 100, 1e4, (half - height - width, height, width))
    axes = frequency_axes(shape)
    assert [axes.count(axis) for axis in range(3)] == list(shape.sections or ())
    expected = [0] * half
    for axis, offset in ((1, 1), (2, 2)):
        count = (shape.sections or ())[axis]
        for place in range(offset, 3 * count, 3):
            expected[place] = axis
    assert axes == expected


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_positions_in_three_dimensions(family: str) -> None:
    texts = prompts(family, 11)
    positions = torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        answer = oracle(family)(torch.tensor(texts), position_ids=positions[:, None], use_cache=False).logits[0]
    _, got = Bench(family).run({0: texts[0]}, positions=positions)
    assert_logits(got[0], answer)
    _, other = Bench(family).run({0: texts[0]}, positions=positions[:, torch.arange(11).flip(0)])
    assert not torch.allclose(other[0], answer, atol=1e-2)


@given(st.integers(1, 50), st.integers(0, 4000))
@settings(deadline=None, max_examples=20)
def test_equal_positions_in_all_dimensions_are_plain_ones(rows: int, start: int) -> None:
    shape = RotaryShape(16, 12, 8192, 1e4, (2, 2, 2))
    rotary = Rotary(shape)
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(start, start + rows)
    one, _ = rotary(positions, x, x)
    three, _ = rotary(positions.expand(3, -1), x, x)
    assert torch.equal(one, three)
    assert torch.equal(one.unflatten(1, (2, 16))[..., 12:], x.unflatten(1, (2, 16))[..., 12:])


def test_positions_in_three_dimensions_are_read_without_scaling() -> None:
    config = read_rotary(text_config("qwen3_5"))
    assert config.scaling is None and config.sections == (4, 2, 2)


@given(
    kind=st.sampled_from(["llama3", "yarn"]),
    size=st.integers(2, 64).map(lambda half: 2 * half),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    factor=st.floats(1.0, 32.0),
    seen=st.integers(64, 8192),
)
@settings(deadline=None)
def test_scaled_frequencies(kind: str, size: int, theta: float, factor: float, seen: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = {"rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": seen}
    if kind == "llama3":
        said |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(head_dim=size, max_position_embeddings=131072, rope_parameters=said)
    expected, length = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    got, ours = scaled_frequencies(read_rotary(config))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    assert ours == pytest.approx(length)
