"""vLLM's attention interface over `atom_patches.kernels.paged_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from atom_patches.kernels.paged_attention import paged_attention


class AtomPagedBackend(AttentionBackend):
    """Grouped-query attention of a decoder; a cache is `[2, blocks, block size, key/value heads, head size]`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @classmethod
    def serves(cls, layer: Mapping[str, Any]) -> bool:
        """Whether the backend serves a layer; `layer` has the arguments by which vLLM chooses one."""
        return (
            layer["dtype"] in cls.supported_dtypes
            and layer["attn_type"] in (None, AttentionType.DECODER)
            and not any(layer[name] for name in ("use_mla", "has_sink", "use_sparse", "use_mm_prefix"))
            and not layer["use_per_head_quant_scales"]
        )

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the name that vLLM's list leaves to others

    @staticmethod
    def get_impl_cls() -> type[AtomPagedImpl]:
        return AtomPagedImpl

    @staticmethod
    def get_builder_cls() -> type[AtomPagedBuilder]:
        return AtomPagedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size


@dataclass
class AtomPagedMetadata(AttentionMetadata):
    """What a step's requests are, as vLLM's runner says it; tensors are those of `CommonAttentionMetadata`."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool


class AtomPagedBuilder(AttentionMetadataBuilder[AtomPagedMetadata]):
    """Copies nothing and waits for nothing: the kernel reads lengths where they are."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.longest: int = vllm_config.model_config.max_model_len

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AtomPagedMetadata:
        """Of one step."""
        given = common_attn_metadata
        return AtomPagedMetadata(
            num_actual_tokens=given.num_actual_tokens,
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            max_query_len=given.max_query_len,
            max_seq_len=given.max_seq_len,
            causal=given.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AtomPagedMetadata:
        """A graph's work is cut for the longest request there may be, whatever the captured step has."""
        metadata = self.build(0, common_attn_metadata)
        metadata.max_seq_len = self.longest
        return metadata

    def update_block_table(
        self, metadata: AtomPagedMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> AtomPagedMetadata:
        """The same step for another group of layers."""
        return AtomPagedMetadata(**{**vars(metadata), "block_table": blk_table, "slot_mapping": slot_mapping})


class AtomPagedImpl(AttentionImpl[AtomPagedMetadata]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError("ATOM_ATTENTION does not serve biases by distance (ALiBi): unset it")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window = sliding_window
        self.soft_cap = logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store a key and a value `[rows, heads, size]` in each slot; a negative slot is padding."""
        keys, values = kv_cache.unbind(0)
        if kv_cache.device.type == "cpu":
            _store(keys, key, slot_mapping)
            _store(values, value, slot_mapping)
            return
        from vllm import _custom_ops as ops

        scales = (layer._k_scale, layer._v_scale)
        ops.reshape_and_cache_flash(key, value, keys, values, slot_mapping, self.kv_cache_dtype, *scales)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AtomPagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from a step's rows to the cache, which has their own keys by now. All are `[rows, heads, size]`."""
        if attn_metadata is None:  # memory is being profiled
            return output.zero_()
        rows = attn_metadata.num_actual_tokens
        keys, values = kv_cache.unbind(0)
        attended, _ = paged_attention(
            query[:rows],
            keys,
            values,
            attn_metadata.block_table,
            cu_seqlens_q=attn_metadata.query_start_loc,
            seq_lens_k=attn_metadata.seq_lens,
            max_seqlen_q=attn_metadata.max_query_len,
            max_seqlen_k=attn_metadata.max_seq_len,
            scale=self.scale,
            causal=attn_metadata.causal,
            window=self.window,
            soft_cap=self.soft_cap,
        )
        output[:rows] = attended
        return output


def _store(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Into a cache `[blocks, block size, heads, size]` of any strides."""
    kept = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[kept].long()
    size = cache.shape[1]
    cache[slots // size, slots % size] = rows[kept].to(cache.dtype)
