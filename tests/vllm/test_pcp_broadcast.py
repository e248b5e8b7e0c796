"""A rank's tensor reaches the others through vLLM's NCCL communicator where a group has one, else through the group.

The communicator is vLLM's own, in threads, with a library beneath that copies within this process's memory.
"""

from __future__ import annotations

import ctypes
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.distributed.device_communicators import pynccl  # noqa: E402
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: E402

from atom_patches.vllm.adapters import pcp_broadcast, pcp_routing  # noqa: E402
from atom_patches.vllm.pcp import sampled_ids as of_first_runner  # noqa: E402
from atom_patches.vllm.pcp_manager import sampled_ids as of_second_runner  # noqa: E402
from tests.vllm import ranks_in_threads  # noqa: E402
from tests.vllm.ranks_in_threads import run_ranks  # noqa: E402

STREAM = 1234
DTYPES = {2: torch.int32, 4: torch.int64, 1: torch.uint8, 7: torch.float32, 9: torch.bfloat16}
"""By NCCL's numbers."""


class Library:
    """What vLLM binds of NCCL: a broadcast, which says where and how it ran."""

    def __init__(self, group: ranks_in_threads.Group) -> None:
        self.group = group
        self.streams: list[int | None] = []

    def ncclBroadcast(self, sent: Any, to: Any, count: int, kind: int, root: int, comm: Any, stream: Any) -> None:
        self.streams.append(stream.value)
        rank = self.group.rank_in_group
        assert comm is self.group and (sent.value is not None) == (rank == root)
        nbytes = count * DTYPES[kind].itemsize
        data = ctypes.string_at(sent.value, nbytes) if rank == root else b""
        told = self.group.meeting.exchange(rank, data)[root]
        ctypes.memmove(to.value, told, nbytes)


def communicator(group: ranks_in_threads.Group) -> Any:
    """vLLM's communicator, as its `__init__` leaves it on a GPU."""
    made: Any = PyNcclCommunicator.__new__(PyNcclCommunicator)
    made.rank, made.world_size, made.device = group.rank_in_group, group.world_size, torch.device("cpu")
    made.nccl, made.comm, made.available, made.disabled = Library(group), group, True, False
    return made


class Group(ranks_in_threads.Group):
    """Counts the broadcasts that are its own."""

    own = 0

    def broadcast(self, tensor: Any, src: int) -> Any:
        self.own += 1
        return super().broadcast(tensor, src)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynccl, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))


@pytest.mark.parametrize("src", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("nccl", ["enabled", "disabled", "absent"])
def test_every_rank_has_what_one_had(nccl: str, dtype: Any, src: int) -> None:
    def work(given: ranks_in_threads.Group) -> Any:
        group: Any = Group(given.meeting, given.rank_in_group)
        if nccl != "absent":
            group.device_communicator = SimpleNamespace(pynccl_comm=communicator(group))
            group.device_communicator.pynccl_comm.disabled = nccl == "disabled"
        own = torch.arange(16).view(16, 1).to(dtype) + 20 * group.rank_in_group
        given_back = pcp_broadcast.broadcast(group, own, src=src)
        assert given_back is own
        streams = group.device_communicator.pynccl_comm.nccl.streams if nccl == "enabled" else []
        return own, group.own, streams

    for own, of_group, streams in run_ranks(3, work):
        assert torch.equal(own, torch.arange(16).view(16, 1).to(dtype) + 20 * src)
        assert (of_group, streams) == ((0, [STREAM]) if nccl == "enabled" else (1, []))


def test_a_communicator_that_vllm_leaves_unused_says_so() -> None:
    """Of a group of one rank, say; what `disabled` means is vLLM's to decide."""
    unused = PyNcclCommunicator(_alone(), torch.device("cpu"))
    group: Any = Group(ranks_in_threads.Meeting(1), 0)
    group.device_communicator = SimpleNamespace(pynccl_comm=unused)
    own = torch.tensor([[7], [8]])
    assert pcp_broadcast.broadcast(group, own, src=0) is own and group.own == 1


def _alone() -> Any:
    from vllm.distributed.utils import StatelessProcessGroup

    alone: Any = StatelessProcessGroup.__new__(StatelessProcessGroup)
    alone.rank, alone.world_size = 0, 1
    return alone


def test_rows_that_do_not_follow_each_other_are_not_sent() -> None:
    group: Any = Group(ranks_in_threads.Meeting(1), 0)
    with pytest.raises(AssertionError, match="from the first on"):
        pcp_broadcast.broadcast(group, torch.zeros(4, 4)[:, :1], src=0)


@pytest.mark.parametrize("patch", [of_first_runner, of_second_runner], ids=["first runner", "second runner"])
@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_ranks_go_on_with_the_first_ones_ids(
    monkeypatch: pytest.MonkeyPatch, patch: ModuleType, nccl: bool, strided: bool
) -> None:
    groups: dict[int, Any] = {}
    monkeypatch.setattr("vllm.distributed.get_pcp_group", lambda: groups[threading.get_ident()])
    second = patch is of_second_runner

    def sample(ids: Any) -> Any:
        output = SimpleNamespace(sampled_token_ids=ids)
        return (output, "sampled", "rejected") if second else output

    def work(given: ranks_in_threads.Group) -> Any:
        group = groups[threading.get_ident()] = Group(given.meeting, given.rank_in_group)
        if nccl:
            group.device_communicator = SimpleNamespace(pynccl_comm=communicator(group))
        ids = torch.arange(8).view(4, 2) + 100 * group.rank_in_group
        found = patch.sample_and_agree(sample)(ids[:, :1] if strided else ids[:, :1].contiguous())
        if second:
            found, *counts = found
            assert counts == ["sampled", "rejected"]
        return found.sampled_token_ids

    for ids in run_ranks(3, work):
        assert ids.tolist() == [[0], [2], [4], [6]]


def test_experts_scores_take_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[int, Any] = {}
    monkeypatch.setattr(pcp_routing, "get_pcp_group", lambda: groups[threading.get_ident()])

    def work(given: ranks_in_threads.Group) -> Any:
        group = groups[threading.get_ident()] = Group(given.meeting, given.rank_in_group)
        group.device_communicator = SimpleNamespace(pynccl_comm=communicator(group))
        return pcp_routing.agreed_logits(torch.full((2, 3), float(group.rank_in_group))), group.own

    for scores, of_group in run_ranks(2, work):
        assert scores.tolist() == [[0.0] * 3] * 2 and of_group == 0
