"""Attention to selected latents on the CPU, and the selection; a `setup` of traffic.py, with what latent_backend does.

Plain torch where vLLM has kernels for GPUs only: from the indexer's turned queries and keys to the buffer of selected
tokens, and from that to the latents' sum. Keys of the indexer are kept in float32, which vLLM rounds to FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import SparseMLAAttentionImpl
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.vllm import latent_backend
from tests.vllm.latent_backend import Cached, LatentBackend, Step, attend, visible, write

report = latent_backend.report


class SparseImpl(Cached, SparseMLAAttentionImpl[Any]):
    """All rows ask in the space of the latents."""

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Step, layer: Any) -> tuple[Tensor, None]:
        asked = torch.cat(q, dim=-1)
        output = asked.new_zeros(*asked.shape[:2], self.kv_lora_rank)
        for rows, cached in attn_metadata.requests(0, len(attn_metadata.lengths), kv_c_and_k_pe_cache):
            selected = self.indexer.topk_indices_buffer[rows].long()
            # One more token stands for those that are none.
            seen = torch.zeros(len(selected), len(cached) + 1, dtype=torch.bool)
            seen.scatter_(1, torch.where(selected < 0, len(cached), selected), True)
            keys = cached.expand(self.num_heads, -1, -1)
            output[rows] = attend(asked[rows], keys, keys[..., : self.kv_lora_rank], seen[:, :-1], self.scale)
        return output, None


class SparseBackend(LatentBackend):
    """Also of the indexers' caches."""

    @staticmethod
    def get_impl_cls() -> Any:
        return SparseImpl


def select(self: Any, hidden: Tensor, queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """In place of vLLM's operation: queries `[rows, heads, size]`, keys `[rows, size]`, weights `[rows, heads]`."""
    steps = get_forward_context().attn_metadata
    chosen: Tensor = self.topk_indices_buffer
    chosen[: len(hidden)] = -1
    if not isinstance(steps, dict):
        return chosen
    step: Any = steps[self.k_cache.prefix]
    cache = self.k_cache.kv_cache.view(torch.float32)
    write(keys, cache, step.slot_mapping)
    for rows, cached in step.requests(0, len(step.lengths), cache):
        products = torch.einsum("rhs,ts->rht", queries[rows], cached).relu()
        scores = (products * weights[rows][..., None]).sum(1)
        scores = scores.masked_fill(~visible(*scores.shape), -torch.inf)
        best = scores.topk(min(self.topk_tokens, len(cached)))
        indices = best.indices.masked_fill(best.values.isinf(), -1)
        chosen[rows, : indices.shape[1]] = indices.int()
    return chosen


def _as_they_are(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """In place of the rounding to FP8, with scales of 1."""
    return x, x.new_ones(len(x), 1)


def install() -> None:
    """From now on, in this process."""
    latent_backend.install()
    model: Any = deepseek_v2
    operation: Any = SparseAttnIndexer
    cache = model.DeepseekV32IndexerCache
    cache.get_attn_backend = lambda self: SparseBackend
    cache.get_kv_cache_spec = lambda self, config: MLAAttentionSpec(
        block_size=self.cache_config.block_size, num_kv_heads=1, head_size=4 * 128, dtype=torch.uint8
    )
    model.per_token_group_quant_fp8 = _as_they_are
    operation.forward_native = select
