"""A worker hands its configuration to the registry.

Why:         the model runner lives in this process, and it may have been spawned.
How:         wrap WorkerWrapperBase.init_worker and hand over this rank's configuration.
Remove when: vLLM offers plugins a call-back with the finished configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="vllm.bootstrap.worker",
    target="vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
    supports="vllm>=0.20.2,<0.34",
    kind="bootstrap",
    upstream="none: vLLM's plugins are not told the configuration",
)


@PATCH.around
def init_worker(original: Any) -> Any:
    """Hand the configuration over before the worker's class is imported."""
    from atom_patches.core.registry import REGISTRY

    def init_worker(self: Any, all_kwargs: list[dict[str, Any]]) -> None:
        REGISTRY.configure("vllm", all_kwargs[self.rpc_rank]["vllm_config"], "worker")
        original(self, all_kwargs)

    return init_worker
