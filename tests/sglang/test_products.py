"""Whose product runs in linear layers and routers in SGLang, for how many rows."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from atom_patches.kernels.linear import MOST_ROWS, counters  # noqa: E402
from atom_patches.models import few_rows  # noqa: E402
from atom_patches.sglang.adapters import products  # noqa: E402
from atom_patches.sglang.kernels import linear as binding  # noqa: E402

OUTPUTS, INPUTS = 40, 32


class Linear(nn.Module):
    """What the product needs of a layer of SGLang's."""

    bias = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method: Any = UnquantizedLinearMethod()


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Linear:
    """One of a matrix that was measured."""
    monkeypatch.setattr(few_rows, "measured", lambda weight: True)
    return products.with_few_rows(Linear())


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product that is this package's."""
    rows: list[int] = []
    plain = products.linear
    monkeypatch.setattr(products, "linear", lambda x, *rest: rows.append(x.shape[0]) or plain(x, *rest))
    return rows


@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_who_runs_for_how_many_rows(rows: int, layer: Linear, ours: list[int]) -> None:
    x = torch.randn(rows, INPUTS, dtype=torch.bfloat16)
    expected = nn.functional.linear(x, layer.weight)
    torch.testing.assert_close(layer.quant_method.apply(layer, x), expected)
    torch.testing.assert_close(products.product_of(layer.weight)(x, layer.weight), expected)
    assert ours == ([rows, rows] if rows <= MOST_ROWS else [])


def test_a_bias_is_added_by_sglang_s_product(layer: Linear, ours: list[int]) -> None:
    x, bias = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((3, INPUTS), (OUTPUTS,)))
    y: Tensor = layer.quant_method.apply(layer, x, bias)
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, bias))
    assert not ours


@pytest.mark.parametrize("rows", [1, 3])
def test_sglang_s_own_product_behind_the_operation(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = UnquantizedLinearMethod.apply
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", lambda *given: asked.append(given) or plain(*given))
    x, weight = torch.randn(rows, INPUTS), torch.randn(OUTPUTS, INPUTS)
    arguments = (x, weight, counters(OUTPUTS))
    assert binding.supports_linear(*arguments).ok and not binding.supports_linear(x[:0], *arguments[1:]).ok
    torch.testing.assert_close(binding.linear(*arguments), nn.functional.linear(x, weight))
    assert len(asked) == 1
