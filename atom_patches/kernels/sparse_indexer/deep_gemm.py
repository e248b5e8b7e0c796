"""Which logits of the indexer DeepGEMM computes, whichever engine brings it along.

Its paged kernel is planned by the caller, and both lay rows out as they like: the engines' bindings see to that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no

from .reference import empty_logits, row_pitch

SIZE, PAGE, HEADS = 128, 64, (32, 64)


def takes_logits(q: Tensor, key: Tensor, key_scale: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Verdict:
    """The arguments of `indexer_logits`."""
    if not q.shape[0] or not key.shape[0]:
        return no("DeepGEMM computes no empty product")
    if any(not x.is_contiguous() for x in (q, key, key_scale, weights, start, end)):
        return no("DeepGEMM takes contiguous arguments")
    if start.dtype != torch.int32 or end.dtype != torch.int32:
        return no("DeepGEMM takes ranges of int32")
    return _takes_queries(q)


def takes_paged_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    lengths: Tensor,
    max_seqlen_k: int,
) -> Verdict:
    """The arguments of `indexer_logits_paged`."""
    if requests is not None:
        return no("DeepGEMM takes a block table with a row for every query")
    if not q.shape[0] or not max_seqlen_k:
        return no("DeepGEMM computes no empty product")
    if cache.shape[1] != PAGE or any(not x.is_contiguous() for x in (q, cache, weights, block_table, lengths)):
        return no(f"DeepGEMM takes blocks of {PAGE} keys and contiguous arguments")
    if block_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        return no("DeepGEMM takes indices of int32")
    return _takes_queries(q)


def in_rows(found: Tensor, queries: int, keys: int) -> Tensor:
    """Logits [queries, keys] as the operator promises their rows; copied where DeepGEMM laid them out otherwise."""
    if found.stride() == (row_pitch(keys), 1):
        return found
    return empty_logits(queries, keys, found.device).copy_(found)


def _takes_queries(q: Tensor) -> Verdict:
    if q.shape[1] not in HEADS or q.shape[2] != SIZE or q.dtype != torch.float8_e4m3fn:
        return no(f"DeepGEMM's logits are for 32 or 64 heads of {SIZE}, not {q.shape[1]} of {q.shape[2]}")
    return YES
