"""Several ranks of an engine on one device: device groups get the gloo backend, and what gloo cannot send is staged.

NCCL refuses two ranks on one GPU. Gloo takes CUDA tensors for the collectives, but aborts the process for a send or a
receive of one, so those go through the host. Nothing of this can be captured in a graph.

`install` is for a process that runs one rank (vLLM's external launcher). Without a GPU it does the same to the CPU
platform.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class StagedCommunicator(DeviceCommunicatorBase):
    """The collectives of vLLM's base communicator, on a gloo group."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Out of place: the engine's operation around this must not return its input."""
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a copy on the host."""
        to = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        dist.send(tensor.cpu(), self.ranks[to], self.cpu_group)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receive on the host, then copy to the device."""
        origin = (self.rank_in_group - 1) % self.world_size if src is None else src
        received = torch.empty(size, dtype=dtype)
        dist.recv(received, self.ranks[origin], self.cpu_group)
        return received.to(self.device)


def install() -> None:
    """Give the engines that this process starts gloo groups and the communicator above."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.dist_backend = "gloo"
    platform.get_device_communicator_cls = classmethod(  # type: ignore[method-assign]
        lambda cls: f"{__name__}.{StagedCommunicator.__name__}"
    )
