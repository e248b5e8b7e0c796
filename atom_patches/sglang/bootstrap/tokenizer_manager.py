"""A tokenizer manager hands its configuration to the registry.

Why:         it lives in the process that was started or, with several tokenizer workers, in processes of their own.
How:         wrap TokenizerManager.__init__ and hand over the configuration that it was given.
Remove when: SGLang offers plugins a call-back with the finished configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.tokenizer_manager",
    target="sglang.srt.managers.tokenizer_manager:TokenizerManager.__init__",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    upstream="none: SGLang's plugins are not told the configuration",
)


@PATCH.around
def init(original: Any) -> Any:
    """Hand the configuration over before the tokenizer manager builds anything from it."""
    from atom_patches.core.registry import REGISTRY

    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        REGISTRY.configure("sglang", server_args, "tokenizer manager")
        original(self, server_args, *args, **kwargs)

    return __init__
