"""A detokenizer hands its configuration to the registry.

Why:         SGLang loads no plugins in this process; without the hook nobody could see whether it is armed.
How:         wrap DetokenizerManager.__init__ and hand over the configuration that it was given.
Remove when: SGLang loads plugins in this process, and tells them the configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.detokenizer",
    target="sglang.srt.managers.detokenizer_manager:DetokenizerManager.__init__",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    upstream="none: SGLang's plugins are not told the configuration",
)


@PATCH.around
def init(original: Any) -> Any:
    """Hand the configuration over before the detokenizer builds anything from it."""
    from atom_patches.core.registry import REGISTRY

    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        REGISTRY.configure("sglang", server_args, "detokenizer")
        original(self, server_args, *args, **kwargs)

    return __init__
