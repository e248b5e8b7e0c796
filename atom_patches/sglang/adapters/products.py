"""Products with weights as they are stored, of few rows: this package's, in linear layers of SGLang's and routers.

A graph is captured for so many rows, and steps outside of graphs know theirs, so Python chooses: prefills take SGLang's
product.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, TypeVar

from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from atom_patches.kernels.linear import MOST_ROWS, linear
from atom_patches.models import few_rows
from atom_patches.models.products import Product

Layer = TypeVar("Layer", bound=nn.Module)


class FewRows(UnquantizedLinearMethod):
    """SGLang's method, but for the product of few rows."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None or x.shape[0] > MOST_ROWS:
            return super().apply(layer, x, bias)
        return linear(x, layer.weight, layer.arrived)


def with_few_rows(layer: Layer) -> Layer:
    """The layer, with this package's product where it may be the faster one."""
    return few_rows.with_few_rows(layer, UnquantizedLinearMethod, FewRows)


def product_of(weight: Tensor) -> Product:
    """The product with these weights: this package's where it may be the faster one."""
    return few_rows.product_of(weight, _few_rows)


def _few_rows(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """x [rows, inputs] times weight [outputs, inputs]."""
    if x.shape[0] > MOST_ROWS:
        return nn.functional.linear(x, weight)
    return linear(x, weight, arrived)
