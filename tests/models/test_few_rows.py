"""Which layers and routers of a decoder have this package's product of few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atom_patches.models import few_rows

OUTPUTS, INPUTS = 40, 32


class Stored:
    """An engine's method for weights as they are stored."""


class Quantised(Stored):
    """One that an engine derives from it."""


class Ours(Stored):
    pass


class Linear(nn.Module):
    """What the product needs of an engine's layer."""

    def __init__(self, dtype: Any = torch.bfloat16, bias: bool = False, method: type = Stored) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(OUTPUTS, dtype=dtype), requires_grad=False) if bias else None
        self.quant_method = method()


def doubled(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """A product that can be told from others."""
    assert arrived.dtype == torch.int32 and not arrived.any()
    return 2 * nn.functional.linear(x, weight)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a GPU, where the product was measured."""
    monkeypatch.setattr(few_rows, "MEASURED", {(OUTPUTS, INPUTS)})
    monkeypatch.setattr(few_rows, "on_nvidia", lambda weight: True)


def taken(layer: Linear) -> bool:
    """Whether a layer has the product."""
    return type(few_rows.with_few_rows(layer, Stored, Ours).quant_method) is Ours


def routed(layer: Linear) -> bool:
    """Whether a router with the same weights has it."""
    x = torch.ones(3, INPUTS, dtype=layer.weight.dtype)
    y, plain = few_rows.product_of(layer.weight, doubled)(x, layer.weight), nn.functional.linear(x, layer.weight)
    assert torch.equal(y, plain) or torch.equal(y, 2 * plain)
    return not torch.equal(y, plain)


def test_what_was_measured() -> None:
    layer = Linear()
    assert not few_rows.has_few_rows(layer)
    assert taken(layer) and routed(layer)
    for module in (layer, few_rows.product_of(layer.weight, doubled)):
        assert isinstance(module, nn.Module) and few_rows.has_few_rows(nn.ModuleList([module]))
        assert not module.state_dict().keys() - {"weight"}, "no checkpoint has counters"
        assert "arrived" in dict(module.named_buffers()), "engines keep buffers while they sleep"


@pytest.mark.parametrize("layer", [Linear(torch.float32), Linear(bias=True), Linear(method=Quantised)])
def test_layers_that_stay_as_they_are(layer: Linear) -> None:
    assert not taken(layer) and not list(layer.buffers())


@pytest.mark.parametrize("fusions", ["0", "experts,qk_rope,kv_cache"])
def test_it_can_be_switched_off(fusions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_FUSIONS", fusions)
    assert not taken(Linear()) and not routed(Linear())


def test_a_shape_that_was_not_measured_and_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "on_nvidia", lambda weight: False)
    assert not taken(Linear()) and not routed(Linear())
    monkeypatch.setattr(few_rows, "on_nvidia", lambda weight: True)
    monkeypatch.setattr(few_rows, "MEASURED", {})
    assert not taken(Linear()) and not routed(Linear())


def test_the_cpu_is_not_an_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not few_rows.on_nvidia(torch.empty(1))
