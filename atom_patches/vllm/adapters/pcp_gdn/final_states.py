"""Every rank learns every request's final states, after the step's last recurrent layer.

Each rank scanned the ends of some requests. No other rank needs their states before the next step, and to meet in each
layer would make all ranks wait for the slowest; so one rank after the other tells them, of many layers at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from atom_patches.runtime.pcp import PcpPlan
from atom_patches.runtime.pcp_gdn_memory import PACKED_BYTES
from atom_patches.vllm.adapters.pcp_broadcast import broadcast
from atom_patches.vllm.adapters.pcp_copies import on_device
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall
from atom_patches.vllm.adapters.pcp_gdn.state_slots import StateSlots
from atom_patches.vllm.adapters.pcp_step import SplitStep

Scanned = tuple[StateSlots, torch.Tensor]
"""A layer's states, and the slot of every request."""


def share_final_states(call: CoreCall) -> None:
    """Note that the call's layer is done; after the last one, share the final states of all."""
    layers: list[Scanned] = call.step.once("scanned layers", list)
    layers.append((call.states, call.metadata.slots))
    if len(layers) == len(call.step.recurrent):
        for owner in range(call.step.plan.world_size):
            for states, slots in packs(call.step.plan, owner, layers):
                _broadcast(call.step, owner, states, slots)


def packs(plan: PcpPlan, owner: int, layers: list[Scanned]) -> Iterator[tuple[list[StateSlots], list[torch.Tensor]]]:
    """Some layers' states and, of each, the slots that ``owner`` sends together, by what every rank knows."""
    finished = torch.tensor(plan.finished(owner), dtype=torch.int64)
    if not len(finished):
        return
    one = max(states.packed_size(1).numel() for states, _ in layers)
    many = max(1, PACKED_BYTES // one)
    together = max(1, many // len(finished))
    for some in (layers[first : first + together] for first in range(0, len(layers), together)):
        for requests in finished.split(many):
            wanted = on_device(requests, some[0][1].device)
            yield [states for states, _ in some], [slots[wanted] for _, slots in some]


def _broadcast(step: SplitStep, owner: int, states: list[StateSlots], slots: list[torch.Tensor]) -> None:
    sizes = [one.packed_size(len(at)) for one, at in zip(states, slots, strict=True)]
    if owner == step.rank:
        parts = [one.pack(at).flatten() for one, at in zip(states, slots, strict=True)]
        broadcast(step.group, torch.cat(parts), src=owner)
        return
    packed = torch.empty(sum(size.numel() for size in sizes), dtype=torch.uint8, device=slots[0].device)
    received = broadcast(step.group, packed, src=owner).split([size.numel() for size in sizes])
    for one, at, size, part in zip(states, slots, sizes, received, strict=True):
        one.unpack(at, part.view(size))
