"""Attention metadata of a split step, for models of full-attention layers.

Why:         vLLM makes metadata of a batch in which each request has all its rows, or of latent attention's pieces.
How:         wrap the metadata building: build those of the whole step, and from these those of this rank's rows, in a
             mapping that carries the split through the forward pass.
Remove when: vLLM's manager serves these models.
"""

from __future__ import annotations

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp
from atom_patches.vllm.pcp_manager._metadata import build_split

PATCH = Patch(
    id="vllm.pcp_manager.dense_metadata",
    target="vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp,
    relies_on=(
        "vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
        "vllm.v1.attention.backend:CommonAttentionMetadata",
    ),
    upstream="vllm-project/vllm#48747",
    changes_graph=True,
)

PATCH.around(build_split)
