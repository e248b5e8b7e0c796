"""Collectives over different numbers of rows per rank, for process groups without them (gloo).

`sizes[r]` is the number of rows of rank r, known to every rank; None means the same number everywhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_gatherv(
    group: dist.ProcessGroup, rows: Tensor | list[Tensor], dim: int, sizes: list[int] | None
) -> Tensor | list[Tensor]:
    """Concatenate every rank's rows along `dim`, in rank order; of a list, every tensor by itself.

    Raises:
        ValueError: this rank holds another number of rows than `sizes` says.
    """
    if isinstance(rows, list):
        return [_gather(group, one, dim, sizes) for one in rows]
    return _gather(group, rows, dim, sizes)


def reduce_scatterv(group: dist.ProcessGroup, rows: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
    """Add up all ranks' tensors, in rank order, and return this rank's part along `dim`.

    Raises:
        ValueError: `sizes` does not add up to the number of rows.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = rows.movedim(dim, 0).contiguous()
    sizes = [sent.shape[0] // ranks] * ranks if sizes is None else sizes
    if sum(sizes) != sent.shape[0]:
        raise ValueError(f"reduce_scatterv: sizes {sizes} do not add up to the {sent.shape[0]} rows of the tensor")
    # Every rank gets the partial sums of its own rows only, and adds them in an order that never changes.
    parts = sent.new_empty((ranks * sizes[rank], *sent.shape[1:]))
    dist.all_to_all_single(parts, sent, [sizes[rank]] * ranks, sizes, group=group)
    return parts.view(ranks, sizes[rank], *sent.shape[1:]).sum(0).movedim(0, dim).contiguous()


def _gather(group: dist.ProcessGroup, rows: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own = rows.movedim(dim, 0).contiguous()
    sizes = [own.shape[0]] * ranks if sizes is None else sizes
    if sizes[rank] != own.shape[0]:
        raise ValueError(f"all_gatherv: rank {rank} holds {own.shape[0]} rows, sizes {sizes} say {sizes[rank]}")
    padded = own.new_zeros((max(sizes), *own.shape[1:]))
    padded[: own.shape[0]] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    parts = [part[:size] for part, size in zip(gathered, sizes, strict=True)]
    return torch.cat(parts).movedim(0, dim).contiguous()
