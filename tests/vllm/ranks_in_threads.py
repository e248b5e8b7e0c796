"""Ranks in threads of one process, with the collectives that the overlay uses, through memory that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch

SECONDS = 20.0
"""A rank that waits longer for the others has lost them."""


class Meeting:
    """Where the ranks of a group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.brought: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = {
            (src, dst): SimpleQueue() for src in range(size) for dst in range(size)
        }

    def exchange(self, rank: int, brings: Any) -> list[Any]:
        """What every rank brings to this collective, by rank."""
        self.brought[rank] = brings
        self.barrier.wait(SECONDS)
        found = list(self.brought)
        self.barrier.wait(SECONDS)
        return found


class Group:
    """One rank's group coordinator."""

    device_communicator: Any = None
    """As where there is no device of the ranks' own."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank_in_group, self.world_size = rank, meeting.size
        self.device, self.device_group = torch.device("cpu"), self
        self.meeting = meeting

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        brought = self.meeting.exchange(self.rank_in_group, ("all_gather", tensor.clone()))
        assert {(name, one.shape) for name, one in brought} == {("all_gather", tensor.shape)}
        return torch.cat([one for _, one in brought], dim=dim)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        brought = self.meeting.exchange(self.rank_in_group, (f"broadcast {src}", tensor.clone()))
        assert {(name, one.shape) for name, one in brought} == {(f"broadcast {src}", tensor.shape)}
        return tensor.copy_(brought[src][1])

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        brought = self.meeting.exchange(self.rank_in_group, ("all_reduce", tensor.clone()))
        assert {(name, one.shape) for name, one in brought} == {("all_reduce", tensor.shape)}
        return torch.stack([one for _, one in brought]).sum(0)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        assert tensor.shape[dim] % self.world_size == 0
        return self.all_reduce(tensor).chunk(self.world_size, dim)[self.rank_in_group]

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.meeting.mail[self.rank_in_group, dst].put(tensor.clone())

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int) -> torch.Tensor:
        received = self.meeting.mail[src, self.rank_in_group].get(timeout=SECONDS)
        assert (received.shape, received.dtype) == (size, dtype)
        return received


def all_to_all_single(received: torch.Tensor, sent: torch.Tensor, *, group: Group) -> None:
    """In place of torch's: equal parts, by rank."""
    brought = group.meeting.exchange(group.rank_in_group, ("all_to_all", sent.clone()))
    parts = [one.chunk(group.world_size)[group.rank_in_group] for _, one in brought]
    received.copy_(torch.cat(parts))


def run_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` gives on each rank, all at the same time; the first error is raised."""
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        try:
            return work(Group(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    assert all(queue.empty() for queue in meeting.mail.values()), "somebody sent what nobody received"
    return [future.result() for future in futures]
