"""The scheduler hands out blocks, and finds cached ones, as without prefill context parallelism.

Why:         vLLM scales each KV-cache manager's block size by the ranks, and rejects hybrid models and recurrent
             state in the prefix cache.
How:         build the manager for one prefill-context-parallel rank.
Remove when: vLLM replicates the KV cache over prefill-context-parallel ranks (it does from 0.26).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atom_patches.core import Patch
from atom_patches.vllm.pcp._config import pcp_enabled

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

PATCH = Patch(
    id="vllm.pcp.kv_cache_manager",
    target="vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
    supports="vllm>=0.20.2,<0.21",
    kind="correctness",
    group="vllm.pcp",
    when=pcp_enabled,
    relies_on=(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.__init__",
        "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.__init__",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.__init__",
    ),
    upstream="vllm-project/vllm#46358",
)


@PATCH.around
def manage_for_one_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Build the manager that the scheduler asks, with the ranks left out."""

    def __init__(self: KVCacheManager, *args: Any, **kwargs: Any) -> None:
        if "pcp_world_size" in kwargs:
            kwargs["pcp_world_size"] = 1
        original(self, *args, **kwargs)

    return __init__
