"""Final states reach all ranks once each, in packs of a limited size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom_patches.runtime.pcp import PcpPlan
from atom_patches.vllm.adapters.pcp_gdn import final_states
from atom_patches.vllm.adapters.pcp_gdn.final_states import packs
from atom_patches.vllm.adapters.pcp_gdn.state_slots import StateSlots

CHANNELS, PAST, HEADS, SIZE = 6, 3, 2, 4
SLOT_BYTES = 4 * (CHANNELS * PAST + HEADS * SIZE * SIZE)


def layer(slots: int, seed: int) -> StateSlots:
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(slots, PAST, CHANNELS, generator=generator)
    return StateSlots((conv, torch.randn(slots, HEADS, SIZE, SIZE, generator=generator)))


@given(st.lists(st.integers(2, 40), min_size=1, max_size=9), st.integers(2, 5), st.integers(1, 7), st.integers(0, 12))
def test_every_layer_of_every_request_is_sent_once(lens: list[int], ranks: int, layers: int, room: int) -> None:
    plan = PcpPlan(ranks, tuple(lens))
    slots = [torch.randperm(len(lens)) + len(lens) * at for at in range(layers)]
    scanned = [(layer(1, at), of_layer) for at, of_layer in enumerate(slots)]
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final_states, "PACKED_BYTES", room * SLOT_BYTES + 1)
        for owner in range(ranks):
            for states, at in packs(plan, owner, scanned):
                states_sent = sum(len(one) for one in at)
                assert len(states) == len(at) and 0 < states_sent <= max(1, room)
                sent += [slot for one in at for slot in one.tolist()]
                assert all(
                    set(one.tolist()) <= set(slots[int(one[0]) // len(lens)][list(plan.finished(owner))].tolist())
                    for one in at
                )
    assert sorted(sent) == list(range(layers * len(lens)))


class Group:
    """Broadcasts between ranks that take turns: the owner first."""

    device_communicator = None

    def __init__(self) -> None:
        self.told: torch.Tensor | None = None

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if self.told is None:
            self.told = tensor.clone()
        assert tensor.shape == self.told.shape
        return tensor.copy_(self.told)


class Step:
    """What `_broadcast` asks of a step."""

    def __init__(self, rank: int, group: Group) -> None:
        self.rank, self.group = rank, group


def test_a_pack_of_layers_arrives_in_the_right_slots() -> None:
    """Each layer has slots of its own; what lies in others stays."""
    ours, theirs = [[layer(5, 10 * rank + at) for at in range(3)] for rank in range(2)]
    before = [one.pack(torch.arange(5)) for one in theirs]
    slots = [torch.tensor(at) for at in ([3, 0], [1, 2], [4, 1])]
    group: Any = Group()
    final_states._broadcast(Step(1, group), 1, ours, slots)  # type: ignore[arg-type]
    final_states._broadcast(Step(0, group), 1, theirs, slots)  # type: ignore[arg-type]
    for own, other, old, at in zip(ours, theirs, before, slots, strict=True):
        assert torch.equal(other.pack(at), own.pack(at))
        kept = torch.tensor(sorted(set(range(5)) - set(at.tolist())))
        assert torch.equal(other.pack(kept), old[kept])
