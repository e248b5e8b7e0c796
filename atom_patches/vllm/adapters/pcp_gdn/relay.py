"""Each rank scans its own rows and hands the state to the next rank.

Where a cut falls inside a request, the rank before the cut hands the convolution's tail and the recurrent state to the
rank after it, which goes on from there, exactly as the engine goes on after a prefill chunk. What is sent does not
depend on the prompt's length, but a rank waits for the ranks before it. A rank that has sent its state goes on with the
layers that follow, so of recurrent layers in a row only the first is waited for.
"""

from __future__ import annotations

import torch

from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall
from atom_patches.vllm.adapters.pcp_gdn.final_states import share_final_states
from atom_patches.vllm.adapters.pcp_gdn.own_rows import scan_own_rows


def run(call: CoreCall) -> None:
    """Run the layer's core on this rank's rows, after the rank before."""
    call.begin()
    if call.metadata.pooled is not None:
        _receive_state(call)
        scan_own_rows(call)
        _send_state(call)
    share_final_states(call)


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
