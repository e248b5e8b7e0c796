"""The router in front of several detokenizers hands its configuration to the registry.

Why:         SGLang loads no plugins in this process; without the hook nobody could see whether it is armed.
How:         wrap the function that the process runs, which is given the configuration; the router itself is not.
Remove when: SGLang loads plugins in this process, and tells them the configuration.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch

PATCH = Patch(
    id="sglang.bootstrap.detokenizer_router",
    target="sglang.srt.managers.multi_tokenizer_mixin:run_multi_detokenizer_router_process",
    supports="sglang>=0.5.15,<0.5.24",
    kind="bootstrap",
    upstream="none: SGLang's plugins are not told the configuration",
)


@PATCH.around
def run_multi_detokenizer_router_process(original: Any) -> Any:
    """Hand the configuration over before the router exists."""
    from atom_patches.core.registry import REGISTRY

    def run_multi_detokenizer_router_process(ipc_name_list: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        REGISTRY.configure("sglang", server_args, "detokenizer router")
        original(ipc_name_list, server_args, *args, **kwargs)

    return run_multi_detokenizer_router_process
