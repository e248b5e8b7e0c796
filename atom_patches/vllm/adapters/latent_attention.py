"""vLLM's interface for attention to latents over `mla_attention`, and over `paged_attention` for prefills.

There are two ways to the same result. A request has S tokens cached, n of them new; a head's keys have N values that
are made of a latent of L values and R that are turned, its values V. In multiplications a head:

    absorbed    n S (2 L + R) + n L (N + V)       queries are taken into the space of the latents, results out of it
    made        S L (N + V) + n S (N + R + V)     keys and values are made of the latents

With few new rows the first way is cheaper, from S = L (N + V) / (2 L - N - V) on up to half as many of them: 85 at the
sizes of DeepSeek-V3, where 1024 rows after as many tokens would cost 2.6 times as much as in the second way. vLLM puts
requests with so few in front (`reorder_batch_threshold`); its layer then asks for each way apart, and does what stands
before and behind the first.

In the second way keys and values are made of a bounded number of tokens at a time (runtime/latent_pieces.py), whose
results are merged by their log-sum-exp. All of them come from the cache, where a step's own latents are by then.
Nothing is kept between steps: while vLLM measures memory, its layer takes, instead of calling a backend, what a backend
may take to make keys and values of cached tokens. A piece has as many tokens as have room in that, and if all requests
came with so many rows that absorbing them took more, fewer are absorbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, MLADims, get_mla_dims
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from atom_patches.kernels.context_gather import gather_rows
from atom_patches.kernels.merge_attention import merge_attention
from atom_patches.kernels.mla_attention import mla_attention, mla_cache_write
from atom_patches.kernels.paged_attention import paged_attention
from atom_patches.runtime.latent_pieces import PAGE, Piece, pieces_of

LEAST_ROOM = 1024
"""Tokens of a piece where vLLM measured less: few prompts, much longer steps than they need."""

RESULTS = 3
"""Of attention, a value of each row and head: what was merged, what is to be merged, and both."""


class AtomLatentBackend(AttentionBackend):
    """Attention of a decoder to all latents; a cache is `[blocks, block size, latent and turned values]`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def serves(cls, layer: Mapping[str, Any]) -> bool:
        """Whether the backend serves a layer; `layer` has the arguments by which vLLM chooses one."""
        return (
            layer["use_mla"]
            and layer["dtype"] in cls.supported_dtypes
            # No kernel for GPUs holds a latent of 512 values in float32.
            and (layer["dtype"] != torch.float32 or current_platform.is_cpu())
            and layer["attn_type"] in (None, AttentionType.DECODER)
            and not any(layer[name] for name in ("use_sparse", "has_sink", "use_mm_prefix"))
            and not layer["use_per_head_quant_scales"]
        )

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the name that vLLM's list leaves to others

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[AtomLatentImpl]:
        return AtomLatentImpl

    @staticmethod
    def get_builder_cls() -> type[AtomLatentBuilder]:
        return AtomLatentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 64  # FlashMLA, a provider of decodes, takes no other

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


@dataclass(frozen=True)
class Absorbed:
    """Requests that ask in the space of the latents; `rows` are theirs in the step."""

    rows: slice
    starts: Tensor
    lengths: Tensor
    blocks: Tensor
    most_rows: int
    most_keys: int


@dataclass
class AtomLatentMetadata(AttentionMetadata):
    """A step's requests; vLLM's layer cuts its rows by the numbers."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: list[Absorbed]
    pieces: list[Piece]


class AtomLatentBuilder(AttentionMetadataBuilder[AtomLatentMetadata]):
    """Waits for nothing: vLLM's runner knows the lengths of prefills on the host."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        sizes = get_mla_dims(vllm_config.model_config)
        self.longest: int = vllm_config.model_config.max_model_len
        self.room = room_of_a_piece(vllm_config, sizes)
        self.few = most_absorbed(vllm_config, sizes)
        self._init_reorder_batch_threshold(self.few)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AtomLatentMetadata:
        """Of one step."""
        return self._built(common_attn_metadata, common_attn_metadata.max_seq_len)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AtomLatentMetadata:
        """A graph's work is cut for the longest request there may be, whatever the captured step has."""
        return self._built(common_attn_metadata, self.longest)

    def _built(self, given: CommonAttentionMetadata, most_keys: int) -> AtomLatentMetadata:
        decodes, prefills, rows, _ = split_decodes_and_prefills(given, self.few)
        return AtomLatentMetadata(
            num_actual_tokens=given.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=rows,
            num_prefills=prefills,
            decode=_absorbed(given, decodes, rows, most_keys),
            pieces=self._pieces(given, decodes) if prefills else [],
        )

    def _pieces(self, given: CommonAttentionMetadata, first: int) -> list[Piece]:
        lengths = given.seq_lens_cpu_upper_bound  # exact, of prefills
        assert lengths is not None
        starts = given.query_start_loc_cpu[first:]
        blocks, size = given.block_table_tensor[first:], self.kv_cache_spec.block_size
        return pieces_of((starts - starts[0]).tolist(), lengths[first:].tolist(), blocks, size, self.room)


def most_absorbed(config: Any, sizes: MLADims) -> int:
    """New rows of a request that ask in the space of the latents; the module says why."""
    made = sizes.qk_nope_head_dim + sizes.v_head_dim
    more = max(1, 2 * sizes.kv_lora_rank - made)
    cheaper = sizes.kv_lora_rank * made // (2 * more)
    # Queries' parts in the space of the latents, both parts together, and results.
    each = _heads(config) * (3 * sizes.kv_lora_rank + sizes.qk_rope_head_dim)
    scheduler, rows = config.scheduler_config, _measured(config, sizes) // each
    if rows < scheduler.max_num_batched_tokens:
        cheaper = min(cheaper, rows // scheduler.max_num_seqs)
    return max(1, cheaper)


def room_of_a_piece(config: Any, sizes: MLADims) -> int:
    """Tokens whose latents, keys and values fit, with results of a step's rows, into what vLLM's layer measures."""
    heads = _heads(config)
    made = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    latent = sizes.kv_lora_rank + sizes.qk_rope_head_dim
    results = RESULTS * config.scheduler_config.max_num_batched_tokens * heads * sizes.v_head_dim
    each = made + heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim) + latent
    return max(LEAST_ROOM, (_measured(config, sizes) - results) // each // PAGE * PAGE)


def _measured(config: Any, sizes: MLADims) -> int:
    """Elements that vLLM's layer takes while memory is measured."""
    tokens = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(config)
    return tokens * _heads(config) * (sizes.qk_nope_head_dim + sizes.v_head_dim)


def _heads(config: Any) -> int:
    """Of this rank."""
    return config.model_config.get_num_attention_heads(config.parallel_config)


def _absorbed(given: CommonAttentionMetadata, requests: int, rows: int, most_keys: int) -> list[Absorbed]:
    """The first `requests`: those of one row in front apart, since kernels for decodes want one of each."""
    starts = given.query_start_loc_cpu[: requests + 1]
    counts = starts.diff()
    single = int((counts <= 1).int().cumprod(0).sum())
    bounds = [(0, single, 1), (single, requests, int(counts.max()) if requests else 0)]
    found = []
    for first, last, most_rows in bounds:
        if first == last:
            continue
        start = int(starts[first])
        moved = given.query_start_loc[first : last + 1]
        found.append(
            Absorbed(
                rows=slice(start, rows if last == requests else int(starts[last])),
                starts=moved - start if start else moved,  # a graph reads where vLLM writes
                lengths=given.seq_lens[first:last],
                blocks=given.block_table_tensor[first:last],
                most_rows=most_rows,
                most_keys=most_keys,
            )
        )
    return found


class AtomLatentImpl(MLAAttentionImpl[AtomLatentMetadata]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        asked = {"ALiBi": alibi_slopes, "sliding windows": sliding_window, "soft caps": logits_soft_cap}
        found = [name for name, value in asked.items() if value]
        if found:
            raise ValueError(f"ATOM_ATTENTION does not serve {', '.join(found)} in attention to latents: unset it")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.latent = kv_lora_rank
        self.plain = qk_nope_head_dim
        self.rope = qk_rope_head_dim
        self.value = v_head_dim
        self.kv_b_proj = kv_b_proj

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Store a latent `[rows, size]` and a turned key in each slot; a negative slot is padding."""
        if not kv_cache.numel() or slot_mapping is None:  # memory is being profiled
            return
        slots = slot_mapping.flatten()
        rows = slots.shape[0]
        mla_cache_write(kv_c_normed[:rows], k_pe.flatten(1)[:rows], slots, kv_cache)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: AtomLatentMetadata,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """From queries in the space of the latents `[rows, heads, latent and turned]` to `[rows, heads, latent]`."""
        asked = q if isinstance(q, Tensor) else torch.cat(q, dim=-1)
        if len(attn_metadata.decode) == 1:
            return self._ask(asked, kv_c_and_k_pe_cache, attn_metadata.decode[0]), None
        output = asked.new_empty(*asked.shape[:2], self.latent)
        for some in attn_metadata.decode:
            output[some.rows] = self._ask(asked, kv_c_and_k_pe_cache, some)
        return output, None

    def _ask(self, asked: Tensor, cache: Tensor, some: Absorbed) -> Tensor:
        output, _ = mla_attention(
            asked[some.rows],
            cache,
            some.blocks,
            cu_seqlens_q=some.starts,
            seq_lens_k=some.lengths,
            max_seqlen_q=some.most_rows,
            max_seqlen_k=some.most_keys,
            scale=self.scale,
            value_size=self.latent,
        )
        return output

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: AtomLatentMetadata,
        k_scale: Tensor,
        output: Tensor,
    ) -> None:
        """From queries `[rows, heads, size]` into output `[rows, heads * value]`, piece by piece."""
        whole = output.view(-1, self.num_heads, self.value)
        total = torch.empty(whole.shape[:2], dtype=torch.float32, device=q.device)
        for piece in attn_metadata.pieces:
            rows = piece.rows
            found, lse = self._attend(q[rows], kv_c_and_k_pe_cache, piece)
            if not piece.causal:  # those came first, and every row was in one
                found, lse = merge_attention(whole[rows], total[rows], found, lse)
            whole[rows] = found
            total[rows] = lse

    def _attend(self, q: Tensor, cache: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        keys, values = self._made(cache, piece.slots, q.dtype)
        return paged_attention(
            q,
            keys.unflatten(0, (-1, PAGE)),
            values.unflatten(0, (-1, PAGE)),
            piece.table,
            cu_seqlens_q=piece.starts,
            seq_lens_k=piece.lengths,
            max_seqlen_q=piece.most_rows,
            max_seqlen_k=piece.most_keys,
            scale=self.scale,
            causal=piece.causal,
            padded=False,
        )

    def _made(self, cache: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values `[slots, heads, size]` of cached latents; of padding, those of a latent of zeros."""
        latents, turned = gather_rows(cache.view(-1, cache.shape[2]).split([self.latent, self.rope], dim=1), slots)
        made = self.kv_b_proj(latents.to(dtype))[0].view(-1, self.num_heads, self.plain + self.value)
        keys = made.new_empty(made.shape[0], self.num_heads, self.plain + self.rope)
        keys[..., : self.plain] = made[..., : self.plain]
        keys[..., self.plain :] = turned[:, None]
        return keys, made[..., self.plain :]
