"""Make every rank but the first prefer other experts for rows that all ranks run, as a rounding difference could."""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Shift such rows' scores by one expert on ranks other than 0."""
    if os.environ["RANK"] == "0":
        return
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from atom_patches.vllm.adapters.pcp_step import current_split_step

    original = ReplicatedLinear.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores, *rest = original(self, *args, **kwargs)
        if self.prefix.endswith(".mlp.gate"):
            step = current_split_step()
            biased = len(scores) if step is None else step.num_replicated
            scores[:biased] = scores[:biased].roll(1, dims=-1)
        return (scores, *rest)

    ReplicatedLinear.forward = forward
