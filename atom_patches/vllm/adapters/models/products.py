"""Linear layers of vLLM's, and routers, whose products of few rows are this package's, in steps that do not have more.

How many rows a step has, a compiled graph does not know. So the product is one operation in it, which looks when it
runs, or is captured; prefills take vLLM's product within it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

from atom_patches.kernels.linear import MOST_ROWS, linear
from atom_patches.models import few_rows
from atom_patches.models.products import Product

Layer = TypeVar("Layer", bound=nn.Module)

OPERATION = "atom_patches::few_rows"


class FewRows(UnquantizedLinearMethod):
    """vLLM's method, but for the product."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None or x.dim() != 2:
            return super().apply(layer, x, bias)
        return torch.ops.atom_patches.few_rows(x, layer.weight, layer.arrived)


def with_few_rows(layer: Layer) -> Layer:
    """The layer, with this package's product where it may be the faster one."""
    return few_rows.with_few_rows(layer, UnquantizedLinearMethod, FewRows)


def product_of(weight: Tensor) -> Product:
    """The product with these weights: this package's where it may be the faster one."""
    return few_rows.product_of(weight, torch.ops.atom_patches.few_rows)


def _few_rows(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """x [rows, inputs] times weight [outputs, inputs]."""
    if x.shape[0] <= MOST_ROWS:
        return linear(x, weight, arrived)
    return dispatch_unquantized_gemm()(_NO_LAYER, x, weight)


_NO_LAYER = nn.Module()
"""vLLM's product of weights as they are stored asks nothing else of a layer."""


def _shape(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_library = torch.library.Library("atom_patches", "FRAGMENT")
_library.define("few_rows(Tensor x, Tensor weight, Tensor arrived) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("few_rows", _few_rows, _device)
torch.library.register_fake(OPERATION, _shape, lib=_library)
