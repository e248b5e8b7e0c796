"""Attention to selected latents on the CPU, and the selection; a `setup` of traffic.py, beside layer_probe.

Plain torch where vLLM has kernels for GPUs only: from the indexer's turned queries and keys to the buffer of selected
tokens, and from that to the latents' sum. Keys of the indexer are kept in float32, which vLLM rounds to FP8. vLLM packs
linear weights for its kernels after loading and drops them; here it keeps them, because the layer wants the
projection's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionMetadataBuilder, SparseMLAAttentionImpl
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.vllm import layer_probe
from tests.vllm.kept_weights import keep_linear_weights

report = layer_probe.report


@dataclass
class Step:
    """A step's requests."""

    num_actual_tokens: int
    starts: list[int]
    lengths: list[int]
    blocks: Tensor
    slot_mapping: Tensor

    def requests(self, cache: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each, and what is cached of it, `[tokens, size]`."""
        size = cache.shape[1]
        for index, length in enumerate(self.lengths):
            rows = slice(self.starts[index], self.starts[index + 1])
            if rows.stop > rows.start:
                yield rows, cache[self.blocks[index, : -(-length // size)]].flatten(0, 1)[:length]


def write(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """One row a slot; a negative slot is padding."""
    real = slots >= 0
    cache.view(-1, cache.shape[-1])[slots[real]] = rows[: len(slots)][real]


def visible(rows: int, tokens: int) -> Tensor:
    """Whether each of the last rows of a request sees each of its tokens."""
    return torch.arange(tokens) <= torch.arange(tokens - rows, tokens)[:, None]


class StepBuilder(AttentionMetadataBuilder[Any]):
    """Of steps in any order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        given = common_attn_metadata
        return Step(
            given.num_actual_tokens, given.query_start_loc.tolist(), given.seq_lens.tolist(),
            given.block_table_tensor.long(), given.slot_mapping,
        )  # fmt: skip


class SparseImpl(SparseMLAAttentionImpl[Any]):
    """All rows ask in the space of the latents, request by request."""

    num_heads: int
    scale: float
    kv_lora_rank: int
    indexer: Any

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)
        self.q_pad_num_heads = None

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any
    ) -> None:
        """Write a latent and a turned key a row, but where vLLM measures memory."""
        if kv_cache.numel() and slot_mapping is not None:
            write(torch.cat([kv_c_normed, k_pe.flatten(1)], dim=1), kv_cache, slot_mapping)

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Step, layer: Any) -> tuple[Tensor, None]:
        asked = torch.cat(q, dim=-1)
        output = asked.new_zeros(*asked.shape[:2], self.kv_lora_rank)
        for rows, cached in attn_metadata.requests(kv_c_and_k_pe_cache):
            selected = self.indexer.topk_indices_buffer[rows].long()
            # One more token stands for those that are none.
            seen = torch.zeros(len(selected), len(cached) + 1, dtype=torch.bool)
            seen.scatter_(1, torch.where(selected < 0, len(cached), selected), True)
            keys = cached.expand(self.num_heads, -1, -1)
            output[rows] = attend(asked[rows], keys, keys[..., : self.kv_lora_rank], seen[:, :-1], self.scale)
        return output, None


def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """`[rows, heads, size]`, of keys and values `[heads, tokens, size]`; what each row sees `[rows, tokens]`."""
    scores = (queries.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


class SparseBackend(MLACommonBackend):
    """What vLLM finds everything by; also of the indexers' caches."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return StepBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []


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
    for rows, cached in step.requests(cache):
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
    layer_probe.install()
    keep_linear_weights()
    _choose_ours()
    model: Any = deepseek_v2
    operation: Any = SparseAttnIndexer
    cache = model.DeepseekV32IndexerCache
    cache.get_attn_backend = lambda self: SparseBackend
    cache.get_kv_cache_spec = lambda self, config: MLAAttentionSpec(
        block_size=self.cache_config.block_size, num_kv_heads=1, head_size=4 * 128, dtype=torch.uint8
    )
    model.per_token_group_quant_fp8 = _as_they_are
    operation.forward_native = select


def _choose_ours() -> None:
    choose = CpuPlatform.get_attn_backend_cls
    if not hasattr(choose, "sparse"):

        def get_attn_backend_cls(
            cls: Any, backend: Any, attn_selector_config: Any, num_heads: int | None = None
        ) -> str:
            if attn_selector_config.use_sparse:
                return f"{__name__}.SparseBackend"
            return choose(backend, attn_selector_config, num_heads)

        get_attn_backend_cls.sparse = True  # pyright: ignore[reportFunctionMemberAccess]
        CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)  # type: ignore[method-assign]
