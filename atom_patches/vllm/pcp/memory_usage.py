"""A request's KV cache is as large as without prefill context parallelism.

Why:         vLLM divides the longest request's KV memory by the context-parallel ranks, so a cache that cannot
             hold one such request would be accepted.
How:         compute the memory from a configuration that shows one prefill-context-parallel rank.
Remove when: vLLM replicates the KV cache over prefill-context-parallel ranks (it does from 0.26).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled, without_pcp

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

PATCH = Patch(
    id="vllm.pcp.memory_usage",
    target="vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    upstream="vllm-project/vllm#46358",
)


@PATCH.around
def whole_request(original: Callable[..., int]) -> Callable[..., int]:
    """Bytes of one request of the longest admissible length."""

    def max_memory_usage_bytes(self: FullAttentionSpec, vllm_config: VllmConfig) -> int:
        return original(self, without_pcp(vllm_config))

    return max_memory_usage_bytes
