"""Which layers of a decoder have this package's product of few rows, and the counters that it needs.

An engine's adapter says how the product is had in its graphs, and from how many rows on its own runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from atom_patches.core import settings
from atom_patches.kernels.linear import counters
from atom_patches.kernels.linear.tiles import MEASURED
from atom_patches.models.products import Product

Layer = TypeVar("Layer", bound=nn.Module)
FewRows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From x, weights and counters to the product of any number of rows."""

COUNTERS = "arrived"


class FewRowsProduct(nn.Module):
    """`product(x, weight)` with weights of another module, of as many outputs as these."""

    arrived: Tensor

    def __init__(self, weight: Tensor, run: FewRows) -> None:
        super().__init__()
        self._run = run
        _count(self, weight)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._run(x, weight, self.arrived)


def product_of(weight: Tensor, run: FewRows) -> Product:
    """The product with these weights: `run` where it may be the faster one."""
    return FewRowsProduct(weight, run) if wanted(weight) else linear


def with_few_rows(layer: Layer, own: type, method: type) -> Layer:
    """The layer of an engine's, with a method of ours where it may be the faster one.

    Args:
        own: the engine's method for weights as they are stored.
        method: is called as `own`; the layer has `arrived` then.
    """
    given: Any = layer
    if type(given.quant_method) is own and given.bias is None and wanted(given.weight):
        _count(given, given.weight)
        given.quant_method = method()
    return layer


def has_few_rows(model: nn.Module) -> bool:
    """Whether some product of a model may be this package's."""
    return any(name.rpartition(".")[2] == COUNTERS for name, _ in model.named_buffers())


def wanted(weight: Tensor) -> bool:
    return "linear" in settings.fusions() and measured(weight)


def measured(weight: Tensor) -> bool:
    """Whether the product with weights of this shape was measured on such a GPU: others would be one operation for
    nothing."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and on_nvidia(weight) and tuple(weight.shape) in MEASURED


def on_nvidia(weight: Tensor) -> bool:
    return weight.is_cuda and torch.version.hip is None


def _count(module: nn.Module, weight: Tensor) -> None:
    """Counters in a buffer, which engines keep while they sleep: zeros are what a call finds, and leaves."""
    module.register_buffer(COUNTERS, counters(weight.shape[0], weight.device), persistent=False)
