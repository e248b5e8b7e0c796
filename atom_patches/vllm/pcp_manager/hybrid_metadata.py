"""Attention metadata of a split step, for models with recurrent layers.

Why:         vLLM makes metadata of a batch in which each request has all its rows, and a recurrent layer of a split
             step needs the whole step besides its own rows.
How:         wrap the metadata building: build those of the whole step, and from these those of this rank's rows, in a
             mapping that carries the split through the forward pass.
Remove when: vLLM's manager serves these models.
"""

from __future__ import annotations

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp_with_recurrence
from atom_patches.vllm.pcp_manager._metadata import build_split

PATCH = Patch(
    id="vllm.pcp_manager.hybrid_metadata",
    target="vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn",
    supports="vllm>=0.32,<0.34",
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

PATCH.around(build_split)
