"""Attention to latents on the CPU, which vLLM's platform refuses there; a `setup` of traffic.py, beside layer_probe.

Plain torch behind vLLM's own layer, which takes decodes and prefills apart: decodes ask in the space of the latents,
and prefills with the keys and values that vLLM's projection makes of them. vLLM packs linear weights for its kernels
after loading and drops them; here it keeps them, because the layer wants the projection's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionMetadataBuilder, MLAAttentionImpl
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from tests.vllm import layer_probe

report = layer_probe.report


@dataclass
class Step:
    """A step's requests, decodes first."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    starts: list[int]
    lengths: list[int]
    blocks: Tensor
    slot_mapping: Tensor
    decode: bool = True  # vLLM asks whether there is one

    def requests(self, first: int, last: int, cache: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The rows of some, counted from those of the first, and what is cached of each, `[tokens, size]`."""
        size = cache.shape[1]
        for index in range(first, last):
            rows = slice(self.starts[index] - self.starts[first], self.starts[index + 1] - self.starts[first])
            length = self.lengths[index]
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
    """Has vLLM put decodes first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        given = common_attn_metadata
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(given)
        starts, lengths, blocks = given.query_start_loc, given.seq_lens, given.block_table_tensor
        return Step(
            given.num_actual_tokens, decodes, decode_tokens, prefills,
            starts.tolist(), lengths.tolist(), blocks.long(), given.slot_mapping,
        )  # fmt: skip


class Cached:
    """What attention to all and to selected latents share, in vLLM's words."""

    num_heads: int
    scale: float
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_b_proj: Any
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


class LatentImpl(Cached, MLAAttentionImpl[Any]):
    """Request by request, over all of its cache."""

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Step, layer: Any) -> tuple[Tensor, None]:
        asked = torch.cat(q, dim=-1)
        output = asked.new_zeros(*asked.shape[:2], self.kv_lora_rank)
        for rows, cached in attn_metadata.requests(0, attn_metadata.num_decodes, kv_c_and_k_pe_cache):
            keys = cached.expand(self.num_heads, -1, -1)
            seen = visible(rows.stop - rows.start, len(cached))
            output[rows] = attend(asked[rows], keys, keys[..., : self.kv_lora_rank], seen, self.scale)
        return output, None

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Step,
        k_scale: Any, output: Tensor,
    ) -> None:  # fmt: skip
        first, count = attn_metadata.num_decodes, attn_metadata.num_prefills
        by_head = output.view(-1, self.num_heads, self.v_head_dim)
        for rows, cached in attn_metadata.requests(first, first + count, kv_c_and_k_pe_cache):
            latents, turned = cached.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=1)
            made = self.kv_b_proj(latents.contiguous())[0].unflatten(1, (self.num_heads, -1)).transpose(0, 1)
            plain, values = made.split([self.qk_nope_head_dim, self.v_head_dim], dim=2)
            keys = torch.cat([plain, turned.expand(self.num_heads, -1, -1)], dim=2)
            seen = visible(rows.stop - rows.start, len(cached))
            by_head[rows] = attend(q[rows], keys, values, seen, self.scale)


def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """`[rows, heads, size]`, of keys and values `[heads, tokens, size]`; what each row sees `[rows, tokens]`."""
    scores = (queries.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


class LatentBackend(MLACommonBackend):
    """What vLLM finds everything by."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return StepBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []


def install() -> None:
    """Make vLLM's CPU platform choose the backend, from now on in this process."""
    layer_probe.install()
    UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: utils.dispatch_cpu_unquantized_gemm(
        layer, remove_weight=False
    )
    choose = CpuPlatform.get_attn_backend_cls
    if not hasattr(choose, "latent"):

        def get_attn_backend_cls(
            cls: Any, backend: Any, attn_selector_config: Any, num_heads: int | None = None
        ) -> str:
            if attn_selector_config.use_sparse:
                return "tests.vllm.sparse_backend.SparseBackend"
            if attn_selector_config.use_mla:
                return f"{__name__}.LatentBackend"
            return choose(backend, attn_selector_config, num_heads)

        get_attn_backend_cls.latent = True  # pyright: ignore[reportFunctionMemberAccess]
        CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)  # type: ignore[method-assign]
