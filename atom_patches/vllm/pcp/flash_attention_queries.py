"""FlashAttention answers the queries that balance the ranks.

Why:         the last rows of a prompt attend to the most keys, and one rank would have all of them.
How:         wrap `forward`: collect the queries that this rank answers, and hand the answers back to the ranks whose
             rows they are. The cache has all keys and values by then.
Remove when: vLLM serves prefill context parallelism with this backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    import torch

PATCH = Patch(
    id="vllm.pcp.flash_attention_queries",
    target="vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=("vllm.model_executor.layers.attention.attention:unified_attention_with_output",),
    upstream="vllm-project/vllm#49564",
)


@PATCH.around
def collect_then_forward(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Answer collected queries, where the step moves them."""
    from atom_patches.vllm.adapters.pcp_attention import answer_moved_queries

    return answer_moved_queries(original)
