"""Which linear layers of a decoder in vLLM take this package's product, and what runs for how many rows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch import Tensor, nn  # noqa: E402
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402

from atom_patches.kernels.linear import MOST_ROWS  # noqa: E402
from atom_patches.vllm.adapters.models import products  # noqa: E402
from atom_patches.vllm.adapters.models.products import OPERATION, FewRows, with_few_rows  # noqa: E402
from tests.vllm.test_atom_graph_splits import Pieces, config_with  # noqa: E402

OUTPUTS, INPUTS = 40, 32


class Linear(nn.Module):
    """What the product needs of a layer of vLLM's."""

    def __init__(self, dtype: Any = torch.bfloat16, bias: bool = False, method: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(OUTPUTS, dtype=dtype), requires_grad=False) if bias else None
        self.quant_method: Any = method or UnquantizedLinearMethod()

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a GPU, where the product was measured."""
    monkeypatch.setattr(products, "MEASURED", {(OUTPUTS, INPUTS)})
    monkeypatch.setattr(products.current_platform, "is_cuda", lambda: True)


def taken(layer: Linear) -> bool:
    return isinstance(with_few_rows(layer).quant_method, FewRows)


@pytest.mark.usefixtures("measured")
def test_a_layer_that_was_measured() -> None:
    layer = Linear()
    assert taken(layer)
    assert not layer.state_dict().keys() - {"weight"}, "no checkpoint has counters"
    assert "arrived" in dict(layer.named_buffers()), "sleep mode keeps buffers"


class Quantised(UnquantizedLinearMethod):
    pass


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("layer", [Linear(torch.float32), Linear(bias=True), Linear(method=Quantised())])
def test_layers_that_stay_as_they_are(layer: Linear) -> None:
    assert not taken(layer) and not list(layer.buffers())


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("fusions", ["0", "experts,qk_rope,kv_cache"])
def test_it_can_be_switched_off(fusions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_FUSIONS", fusions)
    assert not taken(Linear())


@pytest.mark.usefixtures("measured")
def test_a_shape_that_was_not_measured_and_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.current_platform, "is_cuda", lambda: False)
    assert not taken(Linear())
    monkeypatch.setattr(products.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(products, "MEASURED", {})
    assert not taken(Linear())


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_who_runs_for_how_many_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[int] = []
    plain = products.linear
    monkeypatch.setattr(products, "linear", lambda x, *rest: ours.append(x.shape[0]) or plain(x, *rest))
    monkeypatch.setattr(products, "dispatch_unquantized_gemm", lambda: lambda _, x, w: nn.functional.linear(x, w))
    layer = with_few_rows(Linear())
    x = torch.randn(rows, INPUTS, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight))
    assert ours == ([rows] if rows <= MOST_ROWS else [])


@pytest.mark.usefixtures("measured")
def test_compiled_graphs_are_not_split_at_a_product() -> None:
    """Nor do they know how many rows there are, and a graph reads and writes what lies still."""
    assert OPERATION not in config_with().compilation_config.splitting_ops
    pieces = Pieces(with_few_rows(Linear()), torch.randn(3, INPUTS, dtype=torch.bfloat16))
    assert pieces.names() == ["graph"] and pieces.moving() == []


@pytest.mark.usefixtures("measured")
def test_as_torch_sees_it() -> None:
    layer: Any = with_few_rows(Linear())
    x = torch.randn(3, INPUTS, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.atom_patches.few_rows.default, (x, layer.weight, layer.arrived))
