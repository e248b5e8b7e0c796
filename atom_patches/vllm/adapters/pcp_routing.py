"""All ranks send a row that each of them runs to the same experts: those that the first rank chooses.

The last bits of such a row may differ between ranks: in a split step it meets other rows on each rank, or a kernel is
tuned otherwise on another GPU. Most of a layer only rounds differently then, but between two experts that are nearly
alike one rank would take the first and another the second. In a step that every rank runs whole, the sum over the ranks
would have a part of each; in a split step, ranks would go on with states that differ by more than rounding.
"""

from __future__ import annotations

import torch
from vllm.distributed import get_pcp_group

from atom_patches.vllm.adapters.pcp_broadcast import broadcast


def agreed_logits(logits: torch.Tensor) -> torch.Tensor:
    """The router logits of the group's first rank, ``[rows, experts]``, on all of its ranks.

    Out of place: they may be an input of the operation around this, which does not say that it changes them.
    """
    group = get_pcp_group()
    first = group.rank_in_group == 0
    sent = logits.contiguous() if first else torch.empty_like(logits, memory_format=torch.contiguous_format)
    return broadcast(group, sent, src=0)


def agree_on_copies(logits: torch.Tensor, ranks: int, copies: torch.Tensor) -> None:
    """Give the ranks' copies of a row the router logits of the first rank's, in place.

    A graph that was captured with them serves any number of copies: which rows they are is read on the device.

    Args:
        logits: of all ranks' rows, ``[ranks * rows, experts]``, rank by rank.
        copies: whether a rank's row, counted from its first, is on every rank; bool, of fewer rows or of more.
    """
    by_rank = logits.unflatten(0, (ranks, -1))
    of_some = by_rank[:, : len(copies)]
    are_copies = copies[: of_some.shape[1], None]
    of_some.copy_(torch.where(are_copies, of_some[:1], of_some))
