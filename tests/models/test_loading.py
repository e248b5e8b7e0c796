"""Weights that a decoder keeps in the model's dtype, out of checkpoints that do not; and tensors without a place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_of_steps import config_of, family_of, saved, text_config
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_parts import PlainParts
from quantised import FORMATS
from torch import Tensor, nn

from atom_patches.models.families import make
from atom_patches.models.loading import dequantise, load_parameter, load_weights

ROUTER = "model.layers.1.mlp.gate"
sizes = st.integers(1, 4)


class Recorded:
    """A decoder of routers, in whose place stands one plain layer."""

    def __init__(self) -> None:
        self.layer = nn.Linear(64, 12, bias=False)
        self.config = config_of("qwen3_moe")

    def get_submodule(self, name: str) -> nn.Module:
        return self.layer

    def map_weights(self, weights: Any) -> Any:
        decoder = make(family_of("qwen3_moe"), text_config("qwen3_moe"), PlainParts())
        return decoder.map_weights(weights)


def load(*weights: tuple[str, Tensor]) -> Tensor:
    decoder: Any = Recorded()
    decoder.layer.weight.data.fill_(torch.nan)
    names = load_weights(decoder, weights)
    assert names == {"layers.1.mlp.gate.weight"}
    return decoder.layer.weight.data


@given(rows=sizes, columns=sizes, of_rows=sizes, of_columns=sizes)
@settings(deadline=None)
def test_a_scale_is_that_of_its_block(rows: int, columns: int, of_rows: int, of_columns: int) -> None:
    scale = torch.arange(1.0, rows * columns + 1).view(rows, columns)
    weight = torch.randn(rows * of_rows, columns * of_columns)
    for i, j in torch.cartesian_prod(torch.arange(len(weight)), torch.arange(weight.shape[1])).view(-1, 2).tolist():
        expected = weight[i, j] * scale[i // of_rows, j // of_columns]
        assert dequantise(weight, scale)[i, j] == expected


def test_one_scale_is_everything_s_and_a_row_of_them_the_rows() -> None:
    weight = torch.randn(4, 6)
    assert torch.equal(dequantise(weight, torch.tensor(2.0)), 2 * weight)
    by_row = torch.arange(4.0)
    assert torch.equal(dequantise(weight, by_row), by_row[:, None] * weight)


def test_blocks_that_do_not_divide_a_weight() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        dequantise(torch.ones(576, 4), torch.ones(5, 1))


@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_plain_layer_gets_what_a_quantised_weight_is_worth(form: str, backwards: bool) -> None:
    weight = torch.randn(48, 64)
    parts, worth = FORMATS[form].store(weight)
    named = [(f"{ROUTER}.{name}", part) for name, part in parts.items()]
    decoder: Any = Recorded()
    decoder.layer = nn.Linear(64, 48, bias=False)
    load_weights(decoder, reversed(named) if backwards else named)
    assert torch.equal(decoder.layer.weight.data, worth)


def test_a_quantised_weight_without_its_scale() -> None:
    with pytest.raises(ValueError, match=r"without scales.*layers\.1\.mlp\.gate"):
        load((f"{ROUTER}.weight", torch.ones(12, 64).to(torch.float8_e4m3fn)))


def test_a_plain_weight_is_taken_as_it_is() -> None:
    weight = saved("qwen3_moe")["model.layers.0.mlp.gate.weight"]
    assert torch.equal(load((f"{ROUTER}.weight", weight)), weight)


def test_biases_of_zeros_may_be_there_and_others_must_have_a_place() -> None:
    weight = (f"{ROUTER}.weight", torch.ones(12, 64))
    assert load(weight, (f"{ROUTER}.bias", torch.zeros(12))).eq(1).all()
    for name in ("bias", "qweight"):
        with pytest.raises(ValueError, match=rf"layers\.1\.mlp\.gate\.{name} \[12\] has no place"):
            load(weight, (f"{ROUTER}.{name}", torch.ones(12)))


def test_shapes_must_fit() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"\[3, 2\] does not fill a parameter \[2, 3\]"):
        load_parameter(parameter, torch.ones(3, 2))
    one = nn.Parameter(torch.zeros(()))
    load_parameter(one, torch.ones(1))
    assert one.item() == 1
