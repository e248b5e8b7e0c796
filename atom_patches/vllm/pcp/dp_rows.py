"""Data-parallel engines tell each other the rows that their ranks really bring to the experts.

Why:         vLLM agrees on the rows of each engine's whole step, by which experts' rows are exchanged between engines.
             An engine that splits its step has fewer on a rank, and how it runs a step only it knows.
How:         wrap the making of a pass's context, where the step's plan is known, and replace the counts: one small
             exchange on the host in each pass, in which engines without work take part too.
Remove when: vLLM splits the prefill of the architectures in `_config.py` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_with_data_parallel_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import DPMetadata, ForwardContext

PATCH = Patch(
    id="vllm.pcp.dp_rows",
    target="vllm.forward_context:create_forward_context",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_with_data_parallel_experts,
    relies_on=(
        "vllm.forward_context:set_forward_context",
        "vllm.forward_context:DPMetadata",
        "vllm.v1.worker.dp_utils:coordinate_batch_across_dp",
        "vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._sequence_parallel_context",
        "vllm.distributed.device_communicators.all2all:AgRsAll2AllManager.dispatch_router_logits",
        "vllm.distributed.device_communicators.all2all:AgRsAll2AllManager.combine",
    ),
    upstream="vllm-project/vllm#48747",
)


@PATCH.around
def count_own_rows(original: Callable[..., ForwardContext]) -> Callable[..., ForwardContext]:
    """Make the context of a forward pass, with the rows that every engine brings to the experts."""
    from atom_patches.vllm.adapters.pcp_experts import experts_are_spread

    def create_forward_context(
        attn_metadata: Any,
        vllm_config: VllmConfig,
        dp_metadata: DPMetadata | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ForwardContext:
        parallel = vllm_config.parallel_config
        ranks = parallel.prefill_context_parallel_size
        if dp_metadata is not None and ranks > 1:
            # Not before: vLLM is still being imported when this function is built.
            from atom_patches.vllm.adapters.pcp_data_parallel import expert_rows, rows_of_engines

            rows = int(dp_metadata.num_tokens_across_dp_cpu[parallel.data_parallel_rank])
            spread = experts_are_spread(vllm_config)
            dp_metadata = rows_of_engines(expert_rows(attn_metadata, rows, ranks, spread))
        return original(attn_metadata, vllm_config, dp_metadata, *args, **kwargs)

    return create_forward_context
