"""What sparse attention holds beside the caches is taken out of the memory that SGLang gives to them.

Why:         SGLang fills the static part of the memory with its caches; selected slots live as long as the engine, and
             each step's selection has a workspace.
How:         take both off the bytes that SGLang finds available for its caches. It counts the index cache itself.
Remove when: backends can state what they need.
"""

from __future__ import annotations

from typing import Any

from atom_patches.core import Patch, PatchError
from atom_patches.sglang.sparse_mla._config import GROUP, sparse_mla_asked

PATCH = Patch(
    id="sglang.sparse_mla.memory",
    target="sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
    supports="sglang>=0.5.17,<0.5.18",
    kind="correctness",
    group=GROUP,
    when=sparse_mla_asked,
    relies_on=(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._resolve_memory_pool_config",
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.resolve_max_num_reqs",
    ),
    upstream="none: backends' own buffers are part of what SGLang leaves free",
)


@PATCH.around
def less_what_is_held(original: Any) -> Any:
    """The bytes that the caches may have."""

    def _profile_available_bytes(self: Any, *args: Any, **kwargs: Any) -> int:
        from atom_patches.sglang.adapters.sparse_mla.sizes import held_bytes

        available = original(self, *args, **kwargs)
        held = held_bytes(self.server_args, self.model_config.hf_config)
        if held >= available:
            raise PatchError(
                f"sparse attention holds {held >> 20} MiB beside the caches, and {available >> 20} MiB are free: raise "
                "--mem-fraction-static, or lower ATOM_SPARSE_MLA_MIB or --chunked-prefill-size"
            )
        return available - held

    return _profile_available_bytes
