"""Ranks exchange what their last rows do to any state, and then scan their own rows at the same time.

1. Halos: the convolution inputs before the cuts are gathered.
2. First pass: each rank whose last segment goes on on the next rank finds what that segment does to the recurrent
   state, and these are gathered. Neither exchange grows with the prompts, or with their number.
3. Each rank composes, in float32, the state that its rows go on from.
4. Second pass: this rank's rows are scanned from that state.

The halos travel apart from the states because the first pass needs them: its keys and values are convolved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_patches.kernels.gdn_chain import gdn_prefill_segment
from atom_patches.runtime.pcp import Segment
from atom_patches.runtime.pcp_gdn import HaloExchange, entering_state, ranks_that_go_on
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall
from atom_patches.vllm.adapters.pcp_gdn.final_states import share_final_states
from atom_patches.vllm.adapters.pcp_gdn.own_rows import scan_own_rows


@dataclass(frozen=True)
class _Indices:
    """What all layers of a step share, on the device.

    Attributes:
        send_rows: this rank's local rows that others need.
        halo: table rows before this rank's slice, ``[taps - 1]``; empty if it goes on with no request.
        slot, resumed, cu_seqlens: of the first pass, a batch of one sequence.
    """

    send_rows: torch.Tensor
    halo: torch.Tensor
    slot: torch.Tensor
    resumed: torch.Tensor
    cu_seqlens: torch.Tensor


def run(call: CoreCall) -> None:
    """Run the layer's core on this rank's rows, from the state that the other ranks' rows lead to."""
    call.begin()
    if ranks_that_go_on(call.step.plan):
        _go_on_from_other_ranks(call)
    if call.metadata.pooled is not None:
        scan_own_rows(call)
    share_final_states(call)


def _go_on_from_other_ranks(call: CoreCall) -> None:
    """Write the states before this rank's rows to the slot of the request that it goes on with."""
    step = call.step
    at = step.once("two_pass", lambda: _indices(call))
    halo = _exchange_halos(call, at)
    ends, maps = _exchange_states(call, at, halo)
    if step.plan.receives_state(step.rank):
        entering = entering_state(step.plan, step.rank, ends, maps)
        call.states.write(_slot(call, step.plan.segments(step.rank)[0]), halo, entering[None])


def _exchange_halos(call: CoreCall, at: _Indices) -> torch.Tensor:
    """The rows before this rank's slice, ``[1, channels, taps - 1]``; without rows if it goes on with no request."""
    step = call.step
    table = step.group.all_gather(call.mixed_qkv[at.send_rows], dim=0)
    if len(at.halo):
        earlier = call.states.conv[_slot(call, step.plan.segments(step.rank)[0])][0].T
        table = torch.cat([table, earlier.to(table.dtype)])
    return table[at.halo].T[None]


def _exchange_states(call: CoreCall, at: _Indices, halo: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`entering_state` takes, of all ranks."""
    step, shape = call.step, call.shape
    heads, sizes = shape.value_heads, [shape.value_size, shape.key_size]
    # Nobody reads what a rank sends whose last segment ends its request.
    send = torch.zeros(heads, sum(sizes), shape.key_size, dtype=torch.float32, device=halo.device)
    if step.plan.sends_state(step.rank):
        end, through = send.split(sizes, dim=1)
        segment = step.plan.segments(step.rank)[-1]
        found, mapped = _first_pass(call, at, segment, halo)
        end.copy_(found[0])
        through.copy_(mapped[0])
        if segment.starts_request:
            end += call.states.recurrent[_slot(call, segment)][0].float() @ mapped[0]
    call.trace("rank %d sends %d bytes of states", step.rank, send.numel() * send.element_size())
    ends, maps = step.group.all_gather(send[None], dim=0).split(sizes, dim=2)
    return ends, maps


def _first_pass(
    call: CoreCall, at: _Indices, segment: Segment, halo: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank's last segment, the state it leaves from zero, and its map; float32."""
    layer, own = call.layer, call.step.own_rows
    rows = slice(own.stop - segment.rows, own.stop)
    earlier = call.states.conv[_slot(call, segment)].to(halo.dtype) if segment.starts_request else halo
    return gdn_prefill_segment(
        call.mixed_qkv[rows],
        call.a[rows],
        call.b[rows],
        conv_weight=layer.conv_weight,
        conv_bias=layer.conv_bias,
        conv_state=earlier.contiguous(),
        slots=at.slot,
        has_initial_state=at.resumed,
        cu_seqlens=at.cu_seqlens,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        key_heads=call.shape.key_heads,
        key_size=call.shape.key_size,
        activation=layer.activation,
        null_slot=None,
    )


def _slot(call: CoreCall, segment: Segment) -> torch.Tensor:
    """The slot of a segment's request, int64 ``[1]``."""
    return call.metadata.slots[segment.request : segment.request + 1]


def _indices(call: CoreCall) -> _Indices:
    plan, rank = call.step.plan, call.step.rank
    exchange = HaloExchange.of(plan, call.shape.taps - 1)
    last = plan.segments(rank)[-1].rows if plan.segments(rank) else 0
    slot = call.index([0])
    return _Indices(
        send_rows=call.index(exchange.send_rows[rank]),
        halo=call.index(exchange.halos[rank]),
        slot=slot,
        resumed=torch.ones_like(slot, dtype=torch.bool),
        cu_seqlens=call.index([0, last]),
    )
