"""Attention to latents over vLLM's cache of them, and the projection that latents come from.

vLLM's own layer chooses row by row: prefills make keys and values of the latents, decodes take queries into their
space.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear

from atom_patches.models.parts import LatentShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LatentPagedAttention(MLAAttention):
    """One latent and one turned key a token, for all heads of this rank."""

    expands = True

    def __init__(
        self, shape: LatentShape, expansion: nn.Module, indexer: nn.Module | None, config: VllmConfig, prefix: str
    ) -> None:
        super().__init__(
            num_heads=shape.heads,
            scale=shape.scale,
            qk_nope_head_dim=shape.plain,
            qk_rope_head_dim=shape.rope,
            v_head_dim=shape.value,
            q_lora_rank=shape.query_rank,
            kv_lora_rank=shape.latent,
            kv_b_proj=expansion,  # pyright: ignore[reportArgumentType]
            cache_config=config.cache_config,
            quant_config=config.quant_config,
            prefix=prefix,
            use_sparse=indexer is not None,
            indexer=indexer,
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, queries: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, selected: Tensor | None
    ) -> Tensor:
        """From queries `[rows, heads, plain]` and `[rows, heads, rope]` to `[rows, heads, value]`."""
        rows, heads = queries.shape[:2]
        whole = torch.cat([queries, turned], dim=2)
        shape = torch.Size((rows, heads * self.v_head_dim))
        return super().forward(whole, latents, keys.unsqueeze(1), output_shape=shape).view(rows, heads, -1)


class Latents(DeepSeekV2FusedQkvAProjLinear):
    """Whole on every rank, with vLLM's kernel for few rows where the published sizes allow it."""

    def __init__(self, inputs: int, outputs: list[int], quant_config: Any, prefix: str) -> None:
        super().__init__(inputs, outputs, quant_config, prefix)
        self.return_bias = False
