"""Experts of another rank, which SGLang's plain torch experts do not expect: their share is nothing."""

from __future__ import annotations

import functools
from typing import Any

from sglang_on_cpu.after_import import replace


def _only_own(forward: Any) -> Any:
    """Experts of other ranks come as -1; let the first own one compute them, with weight 0.

    One choice of all rows at a time, because SGLang counts an expert once a row, however often the row chose it.
    """

    @functools.wraps(forward)
    def own(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        foreign = topk_output.topk_ids < 0
        if not foreign.any():
            return forward(layer, x, topk_output, config)
        weights = topk_output.topk_weights.masked_fill(foreign, 0.0)
        ids = topk_output.topk_ids.masked_fill(foreign, 0)
        return sum(
            forward(
                layer, x, topk_output._replace(topk_weights=weights[:, i : i + 1], topk_ids=ids[:, i : i + 1]), config
            )
            for i in range(ids.shape[1])
        )

    return own


def install() -> None:
    replace("sglang.srt.layers.moe.fused_moe_native", "moe_forward_native", _only_own)
