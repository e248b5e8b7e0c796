"""The indexer that selects among the latents of SGLang's cache."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from torch import Tensor

from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.parts import RotaryShape
from atom_patches.sglang.adapters.current import current_batch
from atom_patches.sglang.adapters.latent import latent_scaling
from atom_patches.sglang.adapters.sparse_mla.indexer import SparseIndexer


class Indexer(SparseIndexer):
    """This package's indexer over SGLang's cache of its keys, with the batch that is running."""

    def __init__(
        self, layer: int, shape: IndexerShape, hidden: int, query_rank: int, rotary: RotaryShape, *,
        quant_config: Any, prefix: str,
    ) -> None:  # fmt: skip
        super().__init__(
            hidden_size=hidden,
            index_n_heads=shape.heads,
            index_head_dim=shape.head_size,
            rope_head_dim=shape.rope_size,
            index_topk=shape.top_k,
            q_lora_rank=query_rank,
            max_position_embeddings=rotary.max_position,
            rope_theta=rotary.theta,
            rope_scaling=latent_scaling(rotary),
            is_neox_style=not shape.interleaved,
            prefix=prefix,
            quant_config=quant_config,
            config=None,
        )
        self._layer = layer

    def forward(self, hidden: Tensor, queries: Tensor, positions: Tensor) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(hidden, queries, positions, current_batch(), self._layer)
