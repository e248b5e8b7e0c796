"""DeepSeek's parts in plain torch: a cache of latents, an indexer without rounding, experts chosen with a bias."""

from __future__ import annotations

from dataclasses import replace

import torch
from step_rows import ROWS
from torch import Tensor, nn

from atom_patches.models.lightning_indexer import IndexerShape
from atom_patches.models.parts import ExpertsShape, LatentShape, RotaryShape
from atom_patches.models.rotary import Rotary


class CachedLatents(nn.Module):
    """Every sequence's latents and turned keys, whole."""

    def __init__(self, shape: LatentShape) -> None:
        super().__init__()
        self.shape = shape
        self.cache: dict[int, Tensor] = {}

    def forward(
        self, queries: Tensor, turned: Tensor, latents: Tensor, keys: Tensor, selected: list[Tensor] | None
    ) -> Tensor:
        whole, cached = torch.cat([queries, turned], dim=2), torch.cat([latents, keys], dim=1)
        output = torch.zeros_like(queries)
        start = 0
        for index, (sequence, rows) in enumerate(ROWS.required()):
            mine = slice(start, start + rows)
            start += rows
            seen = grown(self.cache, sequence, cached[mine])
            allowed = causal(rows, len(seen)) if selected is None else selected[index]
            scores = torch.einsum("rhd,td->hrt", whole[mine], seen) * self.shape.scale
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            output[mine] = torch.einsum("hrt,td->rhd", weights, seen[:, : self.shape.latent])
        return output


class PlainIndexer(nn.Module):
    """Of each sequence, which tokens each row attends to: [rows, tokens] bool."""

    def __init__(self, shape: IndexerShape, hidden: int, query_rank: int, rotary: RotaryShape) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = nn.Linear(query_rank, shape.heads * shape.head_size, bias=False)
        self.wk = nn.Linear(hidden, shape.head_size, bias=False)
        self.weights_proj = nn.Linear(hidden, shape.heads, bias=False)
        self.k_norm = nn.LayerNorm(shape.head_size, eps=1e-6)
        self.rotary = Rotary(replace(rotary, head_size=shape.head_size, interleaved=shape.interleaved))
        self.cache: dict[int, Tensor] = {}
        for parameter in self.parameters():
            nn.init.constant_(parameter, torch.nan)

    def forward(self, hidden: Tensor, queries: Tensor, positions: Tensor) -> list[Tensor]:
        q, k = self.rotary(positions, self.wq_b(queries), self.k_norm(self.wk(hidden)))
        q, weights = q.unflatten(1, (self.shape.heads, -1)), self.weights_proj(hidden)
        chosen: list[Tensor] = []
        start = 0
        for sequence, rows in ROWS.required():
            mine = slice(start, start + rows)
            start += rows
            seen = grown(self.cache, sequence, k[mine])
            scores = torch.einsum("rh,rht->rt", weights[mine], torch.einsum("rhd,td->rht", q[mine], seen).relu())
            allowed = causal(rows, len(seen))
            best = scores.masked_fill(~allowed, -torch.inf).topk(min(self.shape.top_k, len(seen))).indices
            chosen.append(torch.zeros_like(allowed).scatter(1, best, value=True) & allowed)
        return chosen


def choose_with_bias(logits: Tensor, bias: Tensor, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """Weights and experts of each row, from its best groups."""
    scores = logits.float().sigmoid()
    rated = (scores + bias).unflatten(1, (shape.groups, -1))
    of_group = rated.topk(2).values.sum(-1).topk(shape.chosen_groups).indices
    kept = torch.zeros(rated.shape[:2], dtype=torch.bool).scatter(1, of_group, value=True)
    chosen = rated.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(shape.chosen).indices
    return scores.gather(1, chosen), chosen


def grown(cache: dict[int, Tensor], sequence: int, rows: Tensor) -> Tensor:
    """All of a sequence's rows, those of this step among them."""
    cache[sequence] = torch.cat([cache[sequence], rows]) if sequence in cache else rows
    return cache[sequence]


def causal(rows: int, tokens: int) -> Tensor:
    return torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)
