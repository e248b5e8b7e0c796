"""All ranks of a group take a tensor of one of them, on the stream at hand.

``torch.distributed`` issues that on a stream of its own, with a wait there and a wait back, and keeps books on the
host; every decode step has one. vLLM's own NCCL communicator, which a group on GPUs has for its other collectives,
needs one launch on the current stream, and can be captured in a graph as those are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.distributed.parallel_state import GroupCoordinator


def broadcast(group: GroupCoordinator, tensor: torch.Tensor, src: int) -> torch.Tensor:
    """Write one rank's tensor over that of every other rank.

    Args:
        group: the ranks, all of which call this.
        tensor: contiguous; of a whole-number or floating-point type, of the same shape on all ranks.
        src: whose, counted within the group.

    Returns:
        The tensor that was given.
    """
    assert tensor.is_contiguous(), "what is sent is as many elements from the first on"
    communicator: Any = group.device_communicator
    nccl = getattr(communicator, "pynccl_comm", None)
    if nccl is None or nccl.disabled:
        return group.broadcast(tensor, src=src)
    nccl.broadcast(tensor, src)
    return tensor
