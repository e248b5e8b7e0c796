"""The process that starts an engine hands its configuration to the registry.

Why:         a launch that cannot be served right has to stop here, before any child process exists.
How:         wrap EngineArgs.create_engine_config and hand over what it returns.
Remove when: vLLM offers plugins a call-back with the finished configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="vllm.bootstrap.engine_args",
    target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
    supports="vllm>=0.20.2,<0.34",
    kind="bootstrap",
    upstream="none: vLLM's plugins are not told the configuration",
)


@PATCH.around
def create_engine_config(original: Any) -> Any:
    """Hand the finished configuration over before anyone uses it."""
    from atom_patches.core.registry import REGISTRY

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        REGISTRY.configure("vllm", config, "api server")
        return config

    return create_engine_config
