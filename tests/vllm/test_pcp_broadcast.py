"""Broadcasts of prefill context parallelism run in the step's own stream where there is a communicator for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from atom_patches.vllm.adapters.pcp_broadcast import broadcast


def group_of(nccl: Any) -> tuple[Any, list[tuple[str, int]]]:
    told: list[tuple[str, int]] = []

    def through_torch(tensor: torch.Tensor, src: int) -> torch.Tensor:
        told.append(("torch", src))
        return tensor

    if nccl is not None:
        nccl.broadcast = lambda tensor, src: told.append(("nccl", src))
    return SimpleNamespace(device_communicator=SimpleNamespace(pynccl_comm=nccl), broadcast=through_torch), told


@pytest.mark.parametrize(
    ("nccl", "by"),
    [
        (SimpleNamespace(disabled=False), "nccl"),
        (SimpleNamespace(disabled=True), "torch"),
        (None, "torch"),
    ],
)
def test_who_broadcasts(nccl: Any, by: str) -> None:
    group, told = group_of(nccl)
    tensor = torch.arange(3)
    assert broadcast(group, tensor, src=1) is tensor
    assert told == [(by, 1)]


def test_without_a_communicator_of_the_engine() -> None:
    group, told = group_of(None)
    group.device_communicator = None
    broadcast(group, torch.arange(3), src=0)
    assert told == [("torch", 0)]
