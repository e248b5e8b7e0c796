"""The scheduler's block sizes are those of an engine without prefill context parallelism.

Why:         vLLM scales the scheduler's block size by the ranks, and rejects hybrid models, whose KV-cache groups
             have several block sizes.
How:         resolve block sizes from a configuration that shows one prefill-context-parallel rank.
Remove when: vLLM replicates the KV cache over prefill-context-parallel ranks (it does from 0.26).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled, without_pcp

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PATCH = Patch(
    id="vllm.pcp.block_sizes",
    target="vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    upstream="vllm-project/vllm#46358",
)


@PATCH.around
def resolve_unscaled(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Resolve the scheduler's and the hash block size, in tokens."""

    def resolve_kv_cache_block_sizes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[int, int]:
        return original(kv_cache_config, without_pcp(vllm_config))

    return resolve_kv_cache_block_sizes
