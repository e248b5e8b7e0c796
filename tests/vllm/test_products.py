"""Whose product runs in linear layers and routers of a decoder in vLLM, for how many rows, and in which graphs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch import Tensor, nn  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402

from atom_patches.kernels.linear import MOST_ROWS  # noqa: E402
from atom_patches.models import few_rows  # noqa: E402
from atom_patches.vllm.adapters.models import products  # noqa: E402
from tests.vllm.test_atom_graph_splits import Pieces, config_with  # noqa: E402

OUTPUTS, INPUTS = 40, 32


class Linear(nn.Module):
    """What the product needs of a layer of vLLM's."""

    bias = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method: Any = UnquantizedLinearMethod()
        products.with_few_rows(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class Routed(nn.Module):
    """The same product as a router has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16), requires_grad=False)
        self.product = products.product_of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


LAYERS = pytest.mark.parametrize("kind", [Linear, Routed])


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a GPU, where the product was measured."""
    monkeypatch.setattr(few_rows, "measured", lambda weight: True)


@LAYERS
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_who_runs_for_how_many_rows(rows: int, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[int] = []
    plain = products.linear
    monkeypatch.setattr(products, "linear", lambda x, *rest: ours.append(x.shape[0]) or plain(x, *rest))
    monkeypatch.setattr(products, "dispatch_unquantized_gemm", lambda: lambda _, x, w: nn.functional.linear(x, w))
    layer = kind()
    x = torch.randn(rows, INPUTS, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight))
    assert ours == ([rows] if rows <= MOST_ROWS else [])


@LAYERS
def test_compiled_graphs_are_not_split_at_a_product(kind: type[Any]) -> None:
    """Nor do they know how many rows there are, and a graph reads and writes what lies still."""
    assert products.OPERATION not in config_with().compilation_config.splitting_ops
    pieces = Pieces(kind(), torch.randn(3, INPUTS, dtype=torch.bfloat16))
    assert pieces.names() == ["graph"] and pieces.moving() == []


def test_as_torch_sees_it() -> None:
    layer: Any = Linear()
    x = torch.randn(3, INPUTS, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.atom_patches.few_rows.default, (x, layer.weight, layer.arrived))
