"""An engine core that has shut down asks for nothing any more.

Why:         a process may start another engine afterwards, and vLLM's multi-process executor keeps the old engine's
             configuration alive through its own finaliser.
How:         wrap EngineCore.shutdown and let the registry forget the configuration, whatever the shutdown raises.
Remove when: MultiprocExecutor no longer holds itself after its shutdown.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="vllm.bootstrap.engine_core_shutdown",
    target="vllm.v1.engine.core:EngineCore.shutdown",
    supports="vllm>=0.20.2,<0.34",
    kind="bootstrap",
    relies_on=("vllm.v1.executor.multiproc_executor:MultiprocExecutor._init_executor",),
    upstream="none: the finaliser is bound to the executor that it watches",
)


@PATCH.around
def shutdown(original: Any) -> Any:
    """Forget the configuration once its engine core has ended."""
    from atom_patches.core.registry import REGISTRY

    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        finally:
            REGISTRY.release("vllm", self.vllm_config)

    return shutdown
