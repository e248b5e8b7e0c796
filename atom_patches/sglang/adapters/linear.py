"""SGLang's parallel linear layers, with the result alone instead of a pair of result and bias.

Subclasses, so that SGLang's quantisation, weight loading and memory accounting see the layers that they know.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from typing import Any, Literal

from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

Ranks = Literal["tp", "attn_tp", "replicated"]
"""Those that share a layer's weights, by the names that SGLang has for them."""

_NAMED = "parallel_group" in inspect.signature(RowParallelLinear.__init__).parameters
"""Whether SGLang takes that name; before, a layer was told its place and their number."""


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


def spread_over(ranks: Ranks) -> dict[str, Any]:
    """The arguments of a layer whose weights these ranks share."""
    if _NAMED:
        return {"parallel_group": ranks}
    parallel = get_parallel()
    places = {
        "tp": (parallel.tp_rank, parallel.tp_size),
        "attn_tp": (parallel.attn_tp_rank, parallel.attn_tp_size),
        "replicated": (0, 1),
    }
    rank, size = places[ranks]
    return {"tp_rank": rank, "tp_size": size}
