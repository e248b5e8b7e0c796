"""An engine that has shut down asks for nothing any more.

Why:         a process may start another engine afterwards, and SGLang's process-wide context keeps the configuration of
             the last one alive.
How:         wrap Engine.shutdown and let the registry forget the configuration, whatever the shutdown raises.
Remove when: SGLang's context lets go of a configuration when its engine ends.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.engine_shutdown",
    target="sglang.srt.entrypoints.engine:Engine.shutdown",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    relies_on=("sglang.srt.runtime_context:publish",),
    upstream="none: the context is meant to outlive engines",
)


@PATCH.around
def shutdown(original: Any) -> Any:
    """Forget the configuration once its engine has ended."""
    from atom_patches.core.registry import REGISTRY

    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        finally:
            REGISTRY.release("sglang", self.server_args)

    return shutdown
