"""The device as SGLang's platform interface sees it.

SGLang asks for it while its first modules are being imported: the memory pools are looked up when they are asked for.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


def _allocator(size: int, page_size: int, **options: Any) -> Any:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if page_size == 1:
        return TokenToKVPoolAllocator(size, **options)
    return PagedTokenToKVPoolAllocator(size, page_size=page_size, **options)


class StandInPlatform(CpuDeviceMixin, SRTPlatform):
    """A foreign device that happens to compute on the CPU, with SGLang's own memory pools."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        class Pool(MLATokenToKVPool):
            """SGLang names an argument here that its own pool, without an indexer, does not have."""

            def __init__(self, *args: Any, index_head_dim: None = None, **options: Any) -> None:
                super().__init__(*args, **options)

        return Pool

    def get_dsa_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        return DSATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        return _allocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
