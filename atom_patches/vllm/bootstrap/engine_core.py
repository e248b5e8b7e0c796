"""The engine core hands its configuration to the registry.

Why:         the scheduler and the KV-cache managers live in this process, and it may have been spawned.
How:         wrap EngineCore.__init__ and hand over the configuration that it was given.
Remove when: vLLM offers plugins a call-back with the finished configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="vllm.bootstrap.engine_core",
    target="vllm.v1.engine.core:EngineCore.__init__",
    supports="vllm>=0.20.2,<0.34",
    kind="bootstrap",
    upstream="none: vLLM's plugins are not told the configuration",
)


@PATCH.around
def init(original: Any) -> Any:
    """Hand the configuration over before the engine core builds anything from it."""
    from atom_patches.core.registry import REGISTRY

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        REGISTRY.configure("vllm", vllm_config, "engine core")
        original(self, vllm_config, *args, **kwargs)

    return __init__
