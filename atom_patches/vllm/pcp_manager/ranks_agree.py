"""Ranks whose environment differs are refused before a model is built, and the others' links are opened.

Why:         every rank decides for itself, from its settings, how a step is split and which collectives it enters; two
             that decide differently wait for each other, in the first forward pass already. And what NCCL allocates for
             their exchanges has to be there when memory is measured.
How:         before the worker loads the model, compare the settings of all ranks, then enter each collective once.
Remove when: nothing of this group reads the environment in a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

PATCH = Patch(
    id="vllm.pcp_manager.ranks_agree",
    target="vllm.v1.worker.gpu_worker:Worker.load_model",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp,
    relies_on=("vllm.v1.worker.gpu.pcp_manager:PCPManager",),
    upstream="none: vLLM has no such settings",
)


@PATCH.around
def compare_then_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load the model on ranks that agree."""
    from atom_patches.vllm.adapters.pcp_links import open_links
    from atom_patches.vllm.adapters.pcp_support import check_link, check_ranks_agree, tell_one_gpu_only

    def load_model(self: Worker, *args: Any, **kwargs: Any) -> Any:
        if self.parallel_config.prefill_context_parallel_size > 1:
            check_ranks_agree(self.vllm_config)
            check_link()
            open_links(self.vllm_config)
            tell_one_gpu_only(self.vllm_config)
        return original(self, *args, **kwargs)

    return load_model
