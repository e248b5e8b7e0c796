"""Full attention on the CPU backend writes the whole step's keys and values, and answers this rank's queries.

Why:         the CPU backend writes its cache inside `forward`, so there is no separate write to wrap.
How:         wrap `forward`: pass gathered keys and values, which it writes with the whole step's slots, and the
             queries that this rank answers, with their own start locations and lengths.
Remove when: the CPU backend writes its cache in `do_kv_cache_update`, as the GPU backends do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    import torch

PATCH = Patch(
    id="vllm.pcp.cpu_attention",
    target="vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",),
    upstream="vllm-project/vllm#48747",
)


@PATCH.around
def gather_then_forward(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Run the backend with gathered keys and values."""
    from atom_patches.vllm.adapters.pcp_attention import answer_moved_queries

    return answer_moved_queries(original, writes_cache=True)
