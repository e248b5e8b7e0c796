"""The process that starts an engine hands its configuration to the registry.

Why:         a launch that cannot be served right has to stop here, before any child process exists.
How:         wrap ServerArgs.check_server_args, which each launch calls once between SGLang's last look for plugins and
             its first child: even a launch that loads this package no earlier than that look is seen. A model that
             is asked for by name and switched off is refused, because then nobody else looks at the name.
Remove when: SGLang offers plugins a call-back with the finished configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.server_args",
    target="sglang.srt.server_args:ServerArgs.check_server_args",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    relies_on=(
        "sglang.srt.entrypoints.engine:Engine._launch_subprocesses",
        "sglang.srt.plugins:load_plugins",
        "sglang.srt.compilation.backend:CompilerManager.compile",  # what engine.py says about compile caches
    ),
    upstream="none: SGLang's plugins are not told the configuration",
)


@PATCH.around
def check_server_args(original: Any) -> Any:
    """Hand the configuration over once SGLang has found nothing wrong with it."""
    from atom_patches.core.conditions import refuse_if_off
    from atom_patches.core.registry import REGISTRY
    from atom_patches.models.choice import IMPL
    from atom_patches.sglang.models._config import GROUP

    def check_server_args(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if str(self.model_impl).lower() == IMPL:
            refuse_if_off(GROUP, f"--model-impl {IMPL}")
        REGISTRY.configure("sglang", self, "engine")

    return check_server_args
