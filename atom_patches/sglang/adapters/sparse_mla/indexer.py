"""The indexer of a DeepSeek layer of SGLang: SGLang's projections, this package's selection.

Its parameters have the names of SGLang's own, so that checkpoints load as they do there.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.layernorm import LayerNorm, RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.rotary_embedding import get_rope_wrapper
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_device
from sglang.srt.utils import add_prefix
from torch import Tensor, nn

from atom_patches.models.lightning_indexer import IndexerShape, select, write_keys
from atom_patches.models.products import linear_in_float32
from atom_patches.sglang.adapters.sparse_mla.caches import index_cache

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from atom_patches.sglang.adapters.sparse_mla.backend import SparseMlaBackend

#: Values that share a scale where SGLang hands over activations that are quantised already.
GROUP = 128


class SparseIndexer(nn.Module):
    """Keeps every token's key, and selects for every row the slots that it attends to."""

    def __init__(
        self,
        *,
        hidden_size: int,
        index_n_heads: int,
        index_head_dim: int,
        rope_head_dim: int,
        index_topk: int,
        q_lora_rank: int,
        max_position_embeddings: int,
        rope_theta: float,
        rope_scaling: dict[str, Any] | None,
        is_neox_style: bool,
        prefix: str,
        quant_config: Any,
        config: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        del unused  # the layer's number comes with each call; blocks and scales are the kernels' affair
        self.shape = IndexerShape(index_n_heads, index_head_dim, rope_head_dim, index_topk, not is_neox_style)
        self.wq_b = ReplicatedLinear(
            q_lora_rank,
            index_n_heads * index_head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("wq_b", prefix),
        )
        self.wk = ReplicatedLinear(
            hidden_size, index_head_dim, bias=False, quant_config=quant_config, prefix=add_prefix("wk", prefix)
        )
        self.weights_proj = ReplicatedLinear(
            hidden_size, index_n_heads, bias=False, prefix=add_prefix("weights_proj", prefix)
        )
        rms = getattr(config, "index_k_norm_type", "layer") == "rms"
        self.k_norm = RMSNorm(index_head_dim) if rms else LayerNorm(index_head_dim, dtype=torch.float32)
        self.rotary_emb = get_rope_wrapper(
            rope_head_dim,
            rotary_dim=rope_head_dim,
            max_position=max_position_embeddings,
            base=rope_theta,  # pyright: ignore[reportArgumentType]
            rope_scaling=rope_scaling,
            is_neox_style=is_neox_style,
            device=get_device().device,
        )

    def forward(
        self,
        x: Tensor | tuple[Tensor, ...],
        q_lora: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        layer_id: int,
        return_indices: bool = True,
    ) -> Tensor | None:
        """Slots [rows, top_k] int32, -1 where a row has no more; None where every row sees all that there is."""
        backend: SparseMlaBackend = get_attn_backend()
        step = backend.plan(forward_batch)
        rows = (x[0] if isinstance(x, tuple) else x).shape[0]
        if step is None:
            return backend.selected(rows).fill_(-1)
        cache = index_cache(backend.token_to_kv_pool, layer_id)
        cos, sin = _angles(self.rotary_emb, positions)
        write_keys(self.k_norm(self.wk(x)[0]), cos, sin, step.slots, cache, self.shape)
        if step.selection is None or not return_indices:
            return None
        q = self.wq_b(q_lora)[0].unflatten(-1, (self.shape.heads, self.shape.head_size))
        out = backend.selected(rows)
        gates = linear_in_float32(_plain(x), self.weights_proj.weight)
        select(q, gates, cos, sin, cache, step.selection, self.shape, backend.workspace, out)
        return out


def _angles(rotary: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, rope / 2]."""
    if hasattr(rotary, "cos_sin_cache"):
        cos, sin = rotary.cos_sin_cache[positions].chunk(2, dim=-1)
        return cos, sin
    return rotary.cos_cache[positions].flatten(1), rotary.sin_cache[positions].flatten(1)  # AITER keeps them apart


def _plain(x: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Activations in the model's dtype; quantised ones come with scales, and some with what they were."""
    if isinstance(x, Tensor):
        return x
    if len(x) == 3:
        return x[2]
    values, scales = x
    return (values.float().unflatten(1, (-1, GROUP)) * scales.float()[..., None]).flatten(1).bfloat16()
