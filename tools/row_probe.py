"""Count, on a worker of a running engine, the rows that its modules really see.

Loaded through vLLM's `worker_extension_cls`; its methods are called with `collective_rpc`.
"""

from __future__ import annotations

from typing import Any

import torch

#: Where rows are counted: a module's class name, and what its rows are called.
COUNTED = {
    "QKVParallelLinear": "projections",
    "MergedColumnParallelLinear": "projections",
    "RowParallelLinear": "projections",
    "Attention": "attention",
    "VocabParallelEmbedding": "embedding",
    "SharedFusedMoE": "experts",
    "FusedMoE": "experts",
}


class RowProbe:
    """Worker methods that count rows by module hooks."""

    def probe_start(self) -> None:
        """Count from now on."""
        self._probe_rows: list[dict[str, list[int]]] = []
        model = self.model_runner.model  # type: ignore[attr-defined]
        model.register_forward_pre_hook(lambda *_: self._probe_rows.append({}))
        for module in model.modules():
            kind = COUNTED.get(type(module).__name__)
            if kind is not None:
                module.register_forward_pre_hook(self._counter(kind), with_kwargs=True)

    def _counter(self, kind: str) -> Any:
        def count(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
            seen = self._probe_rows[-1].setdefault(kind, [])
            if first.shape[0] not in seen:
                seen.append(first.shape[0])

        return count

    def probe_take(self) -> list[dict[str, list[int]]]:
        """For every forward pass since the last call: the distinct row counts of each kind of module."""
        taken, self._probe_rows = self._probe_rows, []
        return taken

    def probe_profile(self) -> list[dict[str, list[int]]]:
        """The same for one memory-profiling pass."""
        self.probe_take()
        self.model_runner.profile_run()  # type: ignore[attr-defined]
        return self.probe_take()

    def probe_experts(self) -> list[tuple[int, int]]:
        """For every layer of experts: how many of them this worker holds, and how wide each is here."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        layers = [module for module in model.modules() if COUNTED.get(type(module).__name__) == "experts"]
        return [(layer.local_num_experts, layer.intermediate_size_per_partition) for layer in layers]

    def probe_requests(self) -> int:
        """Requests that the runner still holds."""
        return len(self.model_runner.requests)  # type: ignore[attr-defined]
