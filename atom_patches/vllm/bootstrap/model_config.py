"""An ATOM decoder that is asked for by name does not quietly become another model.

Why:         vLLM takes any text for `--model-impl`, and treats one that it does not know like the default. Where the
             ATOM models are switched off, nobody else would notice.
How:         wrap EngineArgs.create_model_config and refuse `atom` there, before anything is built.
Remove when: vLLM lets plugins add an implementation, and refuses the name of any other.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="vllm.bootstrap.model_config",
    target="vllm.engine.arg_utils:EngineArgs.create_model_config",
    supports="vllm>=0.20.2,<0.21",
    kind="bootstrap",
    upstream="none: vLLM's option lists names, and does not check them",
)


@PATCH.around
def create_model_config(original: Any) -> Any:
    """Refuse an implementation that is switched off."""
    from atom_patches.core.conditions import refuse_if_off
    from atom_patches.models.choice import IMPL
    from atom_patches.vllm.models._config import GROUP

    def create_model_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model_impl == IMPL:
            refuse_if_off(GROUP, f"--model-impl {IMPL}")
        return original(self, *args, **kwargs)

    return create_model_config
