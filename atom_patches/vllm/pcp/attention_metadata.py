"""A step is planned, and its metadata built for the rows that this rank runs.

Why:         vLLM has no token split for prefill context parallelism: every rank would run every row.
How:         wrap the metadata building: plan the step from its global lengths, and return metadata of this rank's
             rows in a mapping that carries the plan through the forward pass. A replicated step stays untouched.
Remove when: vLLM splits the prefill of the architectures in `_config.py` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PATCH = Patch(
    id="vllm.pcp.attention_metadata",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
        "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor",
    ),
    upstream="vllm-project/vllm#48747",
    changes_graph=True,
)


@PATCH.around
def plan_and_build(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Build the step's metadata, split where it pays."""
    from atom_patches.vllm.adapters.pcp_step import plan_batch, split_step

    def _build_attention_metadata(
        self: GPUModelRunner, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        metadata, drafting = original(self, num_tokens, num_reqs, *args, **kwargs)
        # Dummy and capturing passes schedule nothing.
        if kwargs.get("num_scheduled_tokens") is None or self.parallel_config.prefill_context_parallel_size == 1:
            return metadata, drafting
        plan = plan_batch(self, num_reqs)
        if plan is None:
            return metadata, drafting
        return split_step(self, plan, kwargs["slot_mappings"], metadata), drafting

    return _build_attention_metadata
