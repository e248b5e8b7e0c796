"""DeepSeek-V3.2's lightning indexer, after its projections: which slots of the paged cache each row attends to.

Queries and keys are turned by their positions, mixed by a Hadamard transform, which leaves their products as they are
and spreads large values before they are rounded to FP8, and scored. See kernels/sparse_indexer for the score.

Source: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, section 2.1, and the inference code published with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from atom_patches.kernels.sparse_indexer import (
    indexer_cache_gather,
    indexer_cache_write,
    indexer_logits,
    indexer_logits_paged,
    indexer_queries,
    local_to_paged,
    topk_indices,
)
from atom_patches.kernels.sparse_indexer.reference import rotate
from atom_patches.runtime.sparse_plan import Workspace


@dataclass(frozen=True)
class IndexerShape:
    """What a checkpoint says about its indexer.

    Attributes:
        interleaved: rotary pairs are neighbours, not halves apart.
    """

    heads: int
    head_size: int
    rope_size: int
    top_k: int
    interleaved: bool

    def workspace(self, budget: int) -> Workspace:
        """Selected within `budget` bytes: a row's queries, thrice in float32 as torch would, and its slots."""
        return Workspace(budget, per_row=13 * self.heads * self.head_size + 12 * self.top_k, per_key=self.head_size + 4)


@dataclass(frozen=True)
class RaggedKeys:
    """Requests whose keys are gathered, and the rows that select from them.

    Attributes:
        table: [requests, pages] int32.
        cu_seqlens_k: [requests + 1] int32.
        total: tokens of all of them.
        rows: rows (begin, end) at a time.
        starts, ends: [rows of the step] int32: the columns among all gathered keys that each row sees.
    """

    table: Tensor
    cu_seqlens_k: Tensor
    total: int
    rows: tuple[tuple[int, int], ...]
    starts: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Selection:
    """Who selects, from what, and where it goes.

    Attributes:
        rows: how many rows there are.
        table: page table [any, pages] int32.
        requests: [rows] int32: each row's line of the table, negative for padding; None: row t's is line t.
        lengths: [rows] int32: how many tokens each row sees.
        longest: none of them is more.
        ragged: gathered keys where many rows share them, else None: keys are read where they lie.
    """

    rows: int
    table: Tensor
    requests: Tensor | None
    lengths: Tensor
    longest: int
    ragged: tuple[RaggedKeys, ...] | None

    def lines(self, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """The table and the lines of some rows."""
        if self.requests is None:
            return self.table[begin:end], None
        return self.table, self.requests[begin:end]


def mix(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of the last dimension, in float32, as one product.

    Raises:
        ValueError: its size is no power of two.
    """
    size = x.shape[-1]
    return (x.float() @ _signs(size, x.device)) * size**-0.5


@functools.cache
def _signs(size: int, device: torch.device) -> Tensor:
    if size & (size - 1):
        raise ValueError(f"the Hadamard transform takes a power of two, got a head size of {size}")
    signs = torch.ones(1, 1, device=device)
    while signs.shape[0] < size:
        signs = torch.cat([torch.cat([signs, signs], dim=1), torch.cat([signs, -signs], dim=1)])
    return signs


def write_keys(key: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, shape: IndexerShape) -> None:
    """Keys [T, D], normed but not turned, into the index cache."""
    turned = rotate(key[:, None], cos, sin, shape.interleaved)[:, 0].to(key.dtype)
    indexer_cache_write(mix(turned), slots, cache, power_of_two=True)


def select(
    q: Tensor,
    gates: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    selection: Selection,
    shape: IndexerShape,
    workspace: Workspace,
    out: Tensor,
) -> None:
    """Put the slots of each row's best tokens into out [at least rows, top_k] int32; what is unused is -1.

    Args:
        q: [at least rows, H, D], not turned.
        gates: [at least rows, H]: what the checkpoint says of each head's weight.
        cos, sin: [at least rows, rope / 2].
    """

    def queries(begin: int, end: int) -> tuple[Tensor, Tensor]:
        some = slice(begin, end)
        return indexer_queries(q[some], gates[some], cos[some], sin[some], interleaved=shape.interleaved)

    def put(begin: int, end: int, positions: Tensor) -> None:
        table, lines = selection.lines(begin, end)
        out[begin:end] = local_to_paged(positions, table, block_size=cache.shape[1], requests=lines)

    if selection.ragged is None:
        most = workspace.rows_with(selection.longest)
        for begin in range(0, selection.rows, most):
            end = min(begin + most, selection.rows)
            put(begin, end, _select_paged(*queries(begin, end), cache, selection, begin, end, shape.top_k))
    else:
        for keys in selection.ragged:
            key, key_scale = indexer_cache_gather(cache, keys.table, cu_seqlens_k=keys.cu_seqlens_k, total=keys.total)
            for begin, end in keys.rows:
                fp8, weights = queries(begin, end)
                first, last = keys.starts[begin:end], keys.ends[begin:end]
                logits = indexer_logits(fp8, key, key_scale, weights, start=first, end=last)
                put(begin, end, topk_indices(logits, start=first, end=last, k=shape.top_k))
    out[selection.rows :] = -1


def _select_paged(
    q: Tensor, weights: Tensor, cache: Tensor, selection: Selection, begin: int, end: int, k: int
) -> Tensor:
    lengths = selection.lengths[begin:end]
    table, lines = selection.lines(begin, end)
    logits = indexer_logits_paged(
        q, cache, weights, table, requests=lines, lengths=lengths, max_seqlen_k=selection.longest
    )
    return topk_indices(logits, end=lengths, k=k)
