"""SGLang's product with weights as they are stored: what its linear layers call.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

_METHOD: Any = UnquantizedLinearMethod()


def supports_linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Verdict:
    if x.numel() == 0:
        return no("SGLang's products are not called with zero rows")
    return YES


def linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    return _METHOD.apply(SimpleNamespace(weight=weight), x)  # it looks only at a layer's weights
