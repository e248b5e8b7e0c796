"""Each rank scans its own rows and hands the state to the next rank.

Where a cut falls inside a request, the rank before the cut hands the convolution's tail and the recurrent state to the
rank after it, which goes on from there, exactly as the engine goes on after a prefill chunk. What is sent does not
depend on the prompt's length, but a rank waits for the ranks before it.
"""

from __future__ import annotations

import torch

from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall


def run(call: CoreCall) -> None:
    """Run the layer's core on this rank's rows, after the rank before."""
    call.begin()
    if call.metadata.pooled is not None:
        _receive_state(call)
        call.run(call.metadata.pooled, call.step.own_rows)
        _send_state(call)
    _share_final_states(call)


def _receive_state(call: CoreCall) -> None:
    step = call.step
    if not step.plan.receives_state(step.rank):
        return
    request = step.plan.segments(step.rank)[0].request
    packed = step.group.recv(call.states.packed_size(1), torch.uint8, src=step.rank - 1)
    call.states.unpack(call.metadata.slots[request : request + 1], packed)


def _send_state(call: CoreCall) -> None:
    step = call.step
    if not step.plan.sends_state(step.rank):
        return
    request = step.plan.segments(step.rank)[-1].request
    packed = call.states.pack(call.metadata.slots[request : request + 1])
    step.group.send(packed, dst=step.rank + 1)
    call.trace("rank %d relays %d bytes of state", step.rank, packed.numel())


def _share_final_states(call: CoreCall) -> None:
    """Each rank broadcasts the states of the requests whose last rows it ran."""
    step, states = call.step, call.states
    for owner in range(step.plan.world_size):
        finished = step.plan.finished(owner)
        if not finished:
            continue
        slots = call.metadata.slots[list(finished)]
        if owner == step.rank:
            packed = states.pack(slots)
        else:
            packed = torch.empty(states.packed_size(len(finished)), dtype=torch.uint8, device=slots.device)
        step.group.broadcast(packed, src=owner)
        if owner != step.rank:
            states.unpack(slots, packed)
