"""Weights that vLLM's CPU platform packed come back bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # noqa: E402

from atom_patches.vllm.adapters.packed_weights import give_back  # noqa: E402


def layer(weight: Any) -> Any:
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    made.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
    made.input_size_per_partition = weight.shape[1]  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_layer_that_has_been_packed(dtype: Any) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 512).to(dtype)
    packed = layer(weight.clone())
    packed.quant_method.process_weights_after_loading(packed)
    assert not packed.weight.numel(), "vLLM keeps weights by now"
    give_back(packed, dtype)
    assert torch.equal(packed.weight, weight)


def test_what_is_there_stays() -> None:
    kept = layer(torch.randn(4, 8))
    weight = kept.weight
    give_back(kept, torch.bfloat16)
    assert kept.weight is weight
    give_back(SimpleNamespace(qweight=weight), torch.bfloat16)
