"""Full attention with rotary positions; in some families with normed queries and keys, and a gate on its output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from atom_patches.models.config import DecoderConfig
from atom_patches.models.norms import RmsNorm
from atom_patches.models.parts import AttentionShape, Parts


class Attention(nn.Module):
    """One rank's heads; the output is a partial sum.

    Where there are gates, each head's query is followed by its gate in the projection, so that whole pairs are spread
    over ranks.
    """

    def __init__(self, config: DecoderConfig, layer: int, parts: Parts, rotary: nn.Module, *, prefix: str) -> None:
        super().__init__()
        size = config.head_size
        self.head_size = size
        self.gated = config.gated
        self.heads = parts.local_heads(config.heads)
        self.kv_heads = parts.local_heads(config.kv_heads)
        per_query = 2 if config.gated else 1
        bias = config.attention_bias
        self.qkv_proj = parts.qkv(
            config.hidden, size, config.heads * per_query, config.kv_heads, prefix=f"{prefix}.qkv_proj", bias=bias
        )
        self.o_proj = parts.row(
            config.heads * size, config.hidden, group="attention", prefix=f"{prefix}.o_proj", bias=bias
        )
        self.normed = config.qk_norm
        if config.qk_norm:
            self.q_norm = RmsNorm(size, config.eps, gemma=config.gemma)
            self.k_norm = RmsNorm(size, config.eps, gemma=config.gemma)
        self.rotary_emb = rotary
        self.prepares = bool(getattr(rotary, "prepares", False))
        shape = AttentionShape(self.heads, self.kv_heads, size, size**-0.5)
        self.attn = parts.attention(layer, shape, prefix=f"{prefix}.attn")
        self.attends = self.prepares and bool(getattr(self.attn, "prepares", False))

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        norms = (self.q_norm, self.k_norm) if self.normed else None
        if self.attends:
            attend: Any = self.attn.attend
            return self.o_proj(attend(self.qkv_proj(hidden), positions, self.rotary_emb, norms, self.gated))
        if self.prepares:
            queries, keys, values, gate = self._prepared(positions, hidden, norms)
        else:
            queries, gate, keys, values = self._project(hidden)
            if norms is not None:
                queries, keys = self.q_norm.alone(queries), self.k_norm.alone(keys)
            queries, keys = self.rotary_emb(positions, queries.flatten(1), keys.flatten(1))
        output: Tensor = self.attn(queries, keys, values)
        if gate is not None:
            output = output * gate.sigmoid()
        return self.o_proj(output)

    def _prepared(
        self, positions: Tensor, hidden: Tensor, norms: tuple[RmsNorm, RmsNorm] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and the gate, `[rows, heads * size]`, as the engine's rotation prepares them."""
        heads = (self.heads, self.kv_heads)
        prepare: Any = self.rotary_emb.prepare
        queries, keys, values, gate = prepare(self.qkv_proj(hidden), positions, heads, norms, self.gated)
        return queries.flatten(1), keys.flatten(1), values.flatten(1), None if gate is None else gate.flatten(1)

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
