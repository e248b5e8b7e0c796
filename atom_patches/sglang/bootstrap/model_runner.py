"""A model runner hands its configuration to the registry.

Why:         tools drive a model runner without a scheduler, and Ray makes schedulers in actors of its own.
How:         wrap ModelRunner.__init__ and hand over the configuration that it was given, wherever that stands among
             the arguments.
Remove when: SGLang offers plugins a call-back with the finished configuration.
"""

from __future__ import annotations

import inspect
from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.model_runner",
    target="sglang.srt.model_executor.model_runner:ModelRunner.__init__",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    upstream="none: SGLang's plugins are not told the configuration",
)


@PATCH.around
def init(original: Any) -> Any:
    """Hand the configuration over before the model runner builds anything from it."""
    from atom_patches.core.registry import REGISTRY

    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        server_args = signature.bind(self, *args, **kwargs).arguments["server_args"]
        REGISTRY.configure("sglang", server_args, "model runner")
        original(self, *args, **kwargs)

    return __init__
