"""On the CPU, linear layers of ATOM decoders take this package's product of few rows; a `setup` of traffic.py.

vLLM packs weights for its kernels after loading and drops them; here it keeps them, for many rows, too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from tests.vllm import layer_probe
from tests.vllm.kept_weights import keep_linear_weights

_products: Counter[str] = Counter()


def install() -> None:
    """From now on, in this process."""
    from vllm.model_executor.layers import utils

    from atom_patches.models import few_rows
    from atom_patches.vllm.adapters.models import products

    layer_probe.install()
    keep_linear_weights()
    plain = products.linear

    def counted(*arguments: Tensor) -> Tensor:
        _products["few"] += 1
        return plain(*arguments)

    def many() -> Any:
        _products["many"] += 1
        return utils.default_unquantized_gemm

    few_rows.measured = lambda weight: True
    products.linear = counted
    products.dispatch_unquantized_gemm = many


def report() -> dict[str, Any]:
    """What layer_probe reports, and how many products were of few rows, and of many."""
    return {**layer_probe.report(), "products": dict(_products)}
