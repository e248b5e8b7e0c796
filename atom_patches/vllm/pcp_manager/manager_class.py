"""The model runner splits steps of dense and hybrid models with this package's manager.

Why:         vLLM's manager serves models with latent attention only: it deals out rows as a recurrent layer cannot run
             them, and nobody gathers keys and values of other attention.
How:         wrap the property by which the runner finds its manager's class.
Remove when: vLLM's manager serves these models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

PATCH = Patch(
    id="vllm.pcp_manager.manager_class",
    target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.pcp_manager_cls",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp,
    relies_on=(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_dummy_attn",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        "vllm.v1.worker.gpu.pcp_manager:PCPManager",
        "vllm.v1.worker.gpu.pcp_manager:maybe_build_pcp_manager",
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        "vllm.v1.worker.gpu.block_table:BlockTables",
    ),
    upstream="vllm-project/vllm#48747",
    changes_graph=True,
)


@PATCH.around
def own_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Name this package's manager, where the option is on."""
    from atom_patches.vllm.adapters.pcp_manager import manager_for

    def pcp_manager_cls(self: GPUModelRunner) -> Any:
        if self.parallel_config.prefill_context_parallel_size == 1 or self.model_config.use_mla:
            return original(self)
        return manager_for(self.vllm_config)

    return pcp_manager_cls
