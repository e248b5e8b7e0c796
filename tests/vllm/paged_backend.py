"""A small attention backend with the shape of FlashAttention and Triton: the cache is written apart from `forward`.

Plain torch on the CPU. Its cache write and `forward` are wrapped with the code that the patches of those backends use,
and `install` makes vLLM choose it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from atom_patches.vllm.adapters.pcp_attention import answer_moved_queries, gather_before_write


class PagedImpl(CPUAttentionBackendImpl):
    """Writes and reads a cache [2, blocks, kv heads, block size, head size]."""

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write one key and value a slot; a negative slot is padding."""
        rows = slot_mapping >= 0
        slots = slot_mapping[rows]
        block, offset = slots // kv_cache.shape[3], slots % kv_cache.shape[3]
        kv_cache[0, block, :, offset] = key[: len(rows)][rows]
        kv_cache[1, block, :, offset] = value[: len(rows)][rows]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache, request by request."""
        if attn_metadata is None:
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for index, seq_len in enumerate(attn_metadata.seq_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            count = rows.stop - rows.start
            if count:
                keys, values = self._cached(kv_cache, attn_metadata.block_table[index], seq_len)
                visible = torch.arange(seq_len) <= torch.arange(seq_len - count, seq_len)[:, None]
                attended = torch.nn.functional.scaled_dot_product_attention(
                    query[rows].transpose(0, 1), keys, values, attn_mask=visible, scale=self.scale, enable_gqa=True
                )
                output[rows] = attended.transpose(0, 1)
        return output

    @staticmethod
    def _cached(kv_cache: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one request, each [kv heads, seq_len, head size]."""
        size = kv_cache.shape[3]
        pages = kv_cache[:, blocks[: -(-seq_len // size)].long()].transpose(1, 2).flatten(2, 3)
        return pages[0, :, :seq_len], pages[1, :, :seq_len]


class GatheringImpl(PagedImpl):
    """With the methods wrapped, once, however often the backend is installed."""

    do_kv_cache_update = gather_before_write(PagedImpl.do_kv_cache_update)
    forward = answer_moved_queries(PagedImpl.forward)


class PagedBackend(CPUAttentionBackend):
    """Registered as the engine's custom backend."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GatheringImpl]:
        return GatheringImpl


def install() -> None:
    """Make vLLM's CPU platform choose the backend, with the wrapped methods."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.PagedBackend")
    CpuPlatform.get_attn_backend_cls = classmethod(  # type: ignore[method-assign]
        lambda cls, *args, **kwargs: f"{__name__}.PagedBackend"
    )
