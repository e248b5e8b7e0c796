"""Paged attention in plain torch: sequence by sequence, with the whole softmax of a row at once."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_AT_ONCE = 512
"""Query rows whose scores are in memory together."""


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    query_positions: Tensor | None,
    padded: bool,
) -> tuple[Tensor, Tensor]:
    """See the package's schema. cu_seqlens_q and seq_lens_k are read on the host."""
    rows, heads, _ = q.shape
    out = q.new_zeros(rows, heads, value_cache.shape[3])
    lse = torch.full((heads, rows), -torch.inf, dtype=torch.float32, device=q.device).mT
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens_k.tolist()
    for i, keys in enumerate(lengths):
        start, end = bounds[i], bounds[i + 1]
        if start == end or keys == 0:
            continue
        key = _of_sequence(key_cache, block_table[i], keys, k_scale, heads)
        value = _of_sequence(value_cache, block_table[i], keys, v_scale, heads)
        if query_positions is None:
            positions = torch.arange(keys - (end - start), keys, device=q.device)
        else:
            positions = query_positions[start:end].long()
        for first in range(start, end, _ROWS_AT_ONCE):
            part = slice(first, min(first + _ROWS_AT_ONCE, end))
            visible = _visible(positions[part.start - start : part.stop - start], keys, causal, window)
            unseen = ~visible.any(0)[:, None, None]
            scores = torch.einsum("qhd,khd->qhk", q[part].float(), key) * scale
            if soft_cap > 0:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
            total = torch.logsumexp(scores, dim=2)
            weights = torch.exp(scores - total[:, :, None]).masked_fill(total[:, :, None].isneginf(), 0.0)
            out[part] = torch.einsum("qhk,khd->qhd", weights, value.masked_fill(unseen, 0.0)).to(q.dtype)
            lse[part] = total
    return out, lse


def _of_sequence(cache: Tensor, blocks: Tensor, keys: int, scale: Tensor | None, heads: int) -> Tensor:
    """A sequence's rows of the cache in float32, a head for each query head: [keys, heads, D]."""
    place = torch.arange(keys, device=cache.device)
    block = blocks.long()[place // cache.shape[1]]
    rows = cache[block, place % cache.shape[1]].float()
    if scale is not None:
        rows = rows * scale.float().view(1, -1, 1)
    return rows.repeat_interleave(heads // cache.shape[2], dim=1)


def _visible(positions: Tensor, keys: int, causal: bool, window: int | None) -> Tensor:
    """[rows, keys]: which keys a row at each position sees."""
    behind = positions[:, None] - torch.arange(keys, device=positions.device)
    if not causal:
        return torch.ones_like(behind, dtype=torch.bool)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)
