"""Attention metadata of a split step, for models with recurrent layers.

Why:         vLLM makes metadata of a batch in which each request has all its rows, and a recurrent layer of a split
             step needs the whole step besides its own rows.
How:         wrap the metadata building: build those of the whole step, and from these those of this rank's rows, in a
             mapping that carries the split through the forward pass.
Remove when: vLLM's manager serves these models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp_with_recurrence

if TYPE_CHECKING:
    import torch

PATCH = Patch(
    id="vllm.pcp_manager.hybrid_metadata",
    target="vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn",
    supports="vllm>=0.32,<0.33",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp_with_recurrence,
    relies_on=(
        "vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata",
        "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor",
        "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
    ),
    upstream="vllm-project/vllm#48747",
    changes_graph=True,
)


@PATCH.around
def build_split(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Build a split step's metadata from those of the whole step."""
    from atom_patches.vllm.adapters.pcp_manager import SplitBatch, split_metadata, whole_batch

    def prepare_attn(
        self: Any,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        prepared = (block_tables, slot_mappings, attn_groups)
        whole = original(self, whole_batch(input_batch), cudagraph_mode, *prepared, *args, **kwargs)
        if not isinstance(input_batch, SplitBatch):
            return whole
        return split_metadata(self.vllm_config, input_batch, *prepared, whole)

    return prepare_attn
