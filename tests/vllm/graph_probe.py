"""Count, on a worker of a running engine, the CUDA graphs that it replays, by the step that it replays them in.

Loaded through vLLM's `worker_extension_cls`; its methods are called with `collective_rpc`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests import untuned

if torch.cuda.is_available():
    untuned.install()


class GraphProbe:
    """Worker methods that count replays."""

    def graphs_start(self) -> None:
        """Count from now on."""
        from vllm.forward_context import get_forward_context

        self._replays: Counter[str] = Counter()
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> Any:
            context = get_forward_context()
            kind = "split" if type(context.attn_metadata).__name__ == "SplitStep" else "whole"
            self._replays[f"{kind} {context.cudagraph_runtime_mode.name}"] += 1
            return replay(graph)

        torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]

    def graphs_take(self) -> dict[str, int]:
        """Replays since the last call, by `split` or `whole` step and the mode of the graphs."""
        taken, self._replays = dict(self._replays), Counter()
        return taken
