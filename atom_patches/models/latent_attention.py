"""Attention whose cache has one latent a token for all heads, in some models to the tokens that an indexer selects.

A head's keys and values are products of the latent. Instead of making them for every token, its query is taken into the
space of the latents, and what it gets from there is taken out of it, unless the engine chooses row by row.

Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atom_patches.models.config import DecoderConfig
from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import DeepseekParts, IndexerParts, LatentShape, Parts


class LatentAttention(nn.Module):
    """One rank's heads; the output is a partial sum."""

    def __init__(self, config: DecoderConfig, layer: int, parts: Parts, rotary: nn.Module, *, prefix: str) -> None:
        super().__init__()
        if not isinstance(parts, DeepseekParts):
            raise TypeError(f"{type(parts).__name__} has no attention to latents")
        sizes = config.latent
        assert sizes is not None
        self.sizes = sizes
        self.heads = parts.local_heads(config.heads)
        self.qkv_a_proj = parts.column(
            config.hidden, (sizes.query_rank, sizes.rank + sizes.rope), group="whole", prefix=f"{prefix}.qkv_a_proj"
        )
        self.q_a_layernorm = RmsNorm(sizes.query_rank, config.eps, gemma=config.gemma)
        self.kv_a_layernorm = RmsNorm(sizes.rank, config.eps, gemma=config.gemma)
        self.q_b_proj = parts.column(
            sizes.query_rank,
            (config.heads * (sizes.plain + sizes.rope),),
            group="attention",
            prefix=f"{prefix}.q_b_proj",
        )
        # Its two parts, key and value of each head, are used one by one; it is never called as a module.
        self.kv_b_proj = parts.latent_expansion(
            sizes.rank, config.heads * (sizes.plain + sizes.value), prefix=f"{prefix}.kv_b_proj"
        )
        self.o_proj = parts.row(config.heads * sizes.value, config.hidden, group="attention", prefix=f"{prefix}.o_proj")
        self.rotary_emb = rotary
        self.indexer: nn.Module | None = None
        if config.indexer is not None:
            if not isinstance(parts, IndexerParts):
                raise TypeError(f"{type(parts).__name__} has no indexer")
            self.indexer = parts.indexer(
                layer, config.indexer, config.hidden, sizes.query_rank, config.rotary, prefix=f"{prefix}.indexer"
            )
        shape = LatentShape(self.heads, sizes.rank, sizes.rope, sizes.query_rank, sizes.plain, sizes.value, sizes.scale)
        self.attn = parts.latent_attention(layer, shape, self.kv_b_proj, self.indexer, prefix=f"{prefix}.attn")
        self.expands: bool = getattr(self.attn, "expands", False)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        sizes = self.sizes
        queries, latents, keys = self.qkv_a_proj(hidden).split([sizes.query_rank, sizes.rank, sizes.rope], dim=1)
        queries, latents = self.q_a_layernorm.alone(queries), self.kv_a_layernorm.alone(latents)
        selected = None if self.indexer is None else self.indexer(hidden, queries, positions)
        by_head: Tensor = self.q_b_proj(queries).unflatten(1, (self.heads, sizes.plain + sizes.rope))
        plain, turning = by_head.split([sizes.plain, sizes.rope], dim=2)
        turned, keys = self.rotary_emb(positions, turning.flatten(1), keys.contiguous())
        turned = turned.unflatten(1, (self.heads, -1))
        if self.expands:
            values: Tensor = self.attn(plain, turned, latents, keys, selected)
        else:
            of_keys, of_values = self._weights()
            absorbed = torch.bmm(plain.transpose(0, 1), of_keys).transpose(0, 1)
            output: Tensor = self.attn(absorbed, turned, latents, keys, selected)
            values = torch.bmm(output.transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1)
        return self.o_proj(values.flatten(1))

    def _weights(self) -> tuple[Tensor, Tensor]:
        """From latents to each head's key `[heads, plain, rank]` and value `[heads, value, rank]`."""
        weight = self.kv_b_proj.weight
        assert isinstance(weight, Tensor)
        by_head = weight.unflatten(0, (self.heads, self.sizes.plain + self.sizes.value))
        return by_head[:, : self.sizes.plain], by_head[:, self.sizes.plain :]
