"""The CPU backend writes the whole step's keys and values to the paged cache.

Why:         each rank has the keys and values of its own rows, and its queries attend to all earlier ones.
How:         wrap the cache write and gather first; `forward` then reads the cache as ever.
Remove when: vLLM's manager serves this backend.
"""

from __future__ import annotations

from collections.abc import Callable

from atom_patches.core import Patch
from atom_patches.vllm.pcp_manager._config import managed_pcp

PATCH = Patch(
    id="vllm.pcp_manager.cpu_attention",
    target="vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
    supports="vllm>=0.32,<0.34",
    kind="correctness",
    group="vllm.pcp_manager",
    when=managed_pcp,
    relies_on=("vllm.model_executor.layers.attention.attention:unified_kv_cache_update",),
    upstream="vllm-project/vllm#49564",
)


@PATCH.around
def gather_then_write(original: Callable[..., None]) -> Callable[..., None]:
    """Gather keys and values, then write them."""
    from atom_patches.vllm.adapters.pcp_attention import gather_before_write

    return gather_before_write(original)
