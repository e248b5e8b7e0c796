"""A broadcast within a step's own stream of work.

`GroupCoordinator.broadcast` goes through torch.distributed, which has a stream of its own for NCCL: the device waits
for one, then for the other, and the host issues both waits. A decode step of a few milliseconds feels that.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator


def broadcast(group: GroupCoordinator, tensor: torch.Tensor, src: int) -> torch.Tensor:
    """Give all ranks of ``group`` the contiguous ``tensor`` of its rank ``src``, in place; returns it."""
    nccl: Any = getattr(group.device_communicator, "pynccl_comm", None)
    if nccl is None or nccl.disabled:
        return group.broadcast(tensor, src=src)
    nccl.broadcast(tensor, src)
    return tensor
