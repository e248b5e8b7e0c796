"""Full attention with normed queries and keys, rotary positions and, in these families, a gate on its output."""

from __future__ import annotations

from torch import Tensor, nn

from atom_patches.models.config import HybridConfig
from atom_patches.models.norms import GemmaRmsNorm
from atom_patches.models.parts import AttentionShape, Parts


class Attention(nn.Module):
    """One rank's heads; the output is a partial sum.

    Each head's query is followed by its gate in the projection, so that whole pairs are spread over ranks.
    """

    def __init__(self, config: HybridConfig, layer: int, parts: Parts, rotary: nn.Module, *, prefix: str) -> None:
        super().__init__()
        size = config.head_size
        self.head_size = size
        self.gated = config.gated
        self.heads = parts.local_heads(config.heads)
        self.kv_heads = parts.local_heads(config.kv_heads)
        per_query = 2 if config.gated else 1
        self.qkv_proj = parts.qkv(
            config.hidden, size, config.heads * per_query, config.kv_heads, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = parts.row(config.heads * size, config.hidden, group="attention", prefix=f"{prefix}.o_proj")
        self.q_norm = GemmaRmsNorm(size, config.eps)
        self.k_norm = GemmaRmsNorm(size, config.eps)
        self.rotary_emb = rotary
        shape = AttentionShape(self.heads, self.kv_heads, size, size**-0.5)
        self.attn = parts.attention(layer, shape, prefix=f"{prefix}.attn")

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        queries, gate, keys, values = self._project(hidden)
        queries, keys = self.q_norm.alone(queries), self.k_norm.alone(keys)
        queries, keys = self.rotary_emb(positions, queries.flatten(1), keys.flatten(1))
        output: Tensor = self.attn(queries, keys, values)
        if gate is not None:
            output = output * gate.sigmoid()
        return self.o_proj(output)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Queries and keys `[rows, heads, size]`, the gate and values `[rows, heads * size]`."""
        per_head = self.head_size * (2 if self.gated else 1)
        sizes = [self.heads * per_head, self.kv_heads * self.head_size, self.kv_heads * self.head_size]
        wide, keys, values = self.qkv_proj(hidden).split(sizes, dim=1)
        queries: Tensor = wide.unflatten(1, (self.heads, per_head))
        keys = keys.unflatten(1, (self.kv_heads, self.head_size))
        if not self.gated:
            return queries, None, keys, values
        queries, gate = queries.chunk(2, dim=2)
        return queries, gate.flatten(1), keys, values
