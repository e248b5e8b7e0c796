"""SGLang's parallel linear layers, with the result alone instead of a pair of result and bias.

Subclasses, so that SGLang's quantisation, weight loading and memory accounting see the layers that they know.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from torch import Tensor


class Column(MergedColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class QueryKeyValue(QKVParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Row(RowParallelLinear):
    """Its result is this rank's share of a sum; the layer's exchange adds the ranks'."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]
