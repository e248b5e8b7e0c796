"""A model that was loaded without a patch that it needs is not served.

Why:         SGLang takes any error of a module that it imports for a model as "that model is not available", logs it
             and serves the checkpoint otherwise. So a patch that cannot be applied in such an import stops nothing.
How:         wrap ModelRunner.load_model and, once it is done, have the registry raise again what was raised there.
Remove when: SGLang lets errors of this kind pass.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.model_loaded",
    target="sglang.srt.model_executor.model_runner:ModelRunner.load_model",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    relies_on=("sglang.srt.models.registry:import_model_classes",),
    upstream="none: the registry of models is meant to survive models that cannot be imported",
)


@PATCH.around
def load_model(original: Any) -> Any:
    """Stop if a patch that is needed failed to apply meanwhile."""
    from atom_patches.core.registry import REGISTRY

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        REGISTRY.confirm("sglang")
        return result

    return load_model
