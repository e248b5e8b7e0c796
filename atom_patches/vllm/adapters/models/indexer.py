"""vLLM's indexer of a DeepSeek-V3.2 layer, with the rotation of its own queries and keys."""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.platforms import current_platform

from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.parts import RotaryShape
from atom_patches.vllm.adapters.models.rotary import vllm_rotary

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LatentIndexer(Indexer):
    """Puts what each row attends to into a buffer that all layers share, where vLLM's attention finds it."""

    stacked = {"wk": ("wk_weights_proj", 0), "weights_proj": ("wk_weights_proj", 1)}

    def __init__(
        self, shape: IndexerShape, hidden: int, query_rank: int, rotary: RotaryShape, config: VllmConfig,
        selected: Tensor, prefix: str,
    ) -> None:  # fmt: skip
        hf: Any = config.model_config.hf_text_config
        super().__init__(config, hf, hidden, query_rank, config.quant_config, config.cache_config, selected, prefix)
        self.rotary = vllm_rotary(replace(rotary, interleaved=shape.interleaved), latent=True)

    def forward(self, hidden: Tensor, queries: Tensor, positions: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(hidden, queries, positions, self.rotary)


def selection_buffer(shape: IndexerShape, config: VllmConfig) -> Tensor:
    """`[rows of the largest step, top_k]`."""
    rows = config.scheduler_config.max_num_batched_tokens
    return torch.empty(rows, shape.top_k, dtype=torch.int32, device=current_platform.device_type)
