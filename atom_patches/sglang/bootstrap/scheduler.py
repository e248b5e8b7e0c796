"""A scheduler hands its configuration to the registry.

Why:         batches are formed, and the model runs, in this process, which was spawned.
How:         wrap Scheduler.__init__ and hand over the configuration that it was given.
Remove when: SGLang offers plugins a call-back with the finished configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.scheduler",
    target="sglang.srt.managers.scheduler:Scheduler.__init__",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    upstream="none: SGLang's plugins are not told the configuration",
)


@PATCH.around
def init(original: Any) -> Any:
    """Hand the configuration over before the scheduler builds anything from it."""
    from atom_patches.core.registry import REGISTRY

    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        REGISTRY.configure("sglang", server_args, "scheduler")
        original(self, server_args, *args, **kwargs)

    return __init__
