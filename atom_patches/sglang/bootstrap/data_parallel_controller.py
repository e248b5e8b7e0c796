"""The data-parallel controller hands its configuration to the registry.

Why:         SGLang loads no plugins in this process, and the schedulers are its children.
How:         wrap DataParallelController.__init__ and hand over the configuration that it was given.
Remove when: SGLang loads plugins in this process, and tells them the configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.data_parallel_controller",
    target="sglang.srt.managers.data_parallel_controller:DataParallelController.__init__",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    upstream="none: SGLang's plugins are not told the configuration",
)


@PATCH.around
def init(original: Any) -> Any:
    """Hand the configuration over before the data parallel controller builds anything from it."""
    from atom_patches.core.registry import REGISTRY

    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        REGISTRY.configure("sglang", server_args, "data parallel controller")
        original(self, server_args, *args, **kwargs)

    return __init__
