"""Ranks exchange what their rows do to any state, and then scan their own rows at the same time.

1. Tails: the convolution inputs around the cuts, and at the requests' ends, are gathered.
2. First pass: each rank finds of each of its segments what it does to the recurrent state, and these are gathered.
   Neither exchange grows with the prompts.
3. Each rank composes, in float32, the state that its rows go on from and every request's final state.
4. Second pass: the engine's own core runs on this rank's rows from that state.

The tails travel apart from the states because the first pass needs them: its keys and values are convolved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_patches.kernels.gdn_chain import gdn_prefill_segment
from atom_patches.runtime.pcp import PcpPlan
from atom_patches.runtime.pcp_gdn import TailExchange, compose, states_per_rank
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall


@dataclass(frozen=True)
class _Indices:
    """What all layers of a step share, on the device.

    Attributes:
        send_rows: this rank's local rows that others need.
        halos: table rows before each of this rank's segments, ``[segments, taps - 1]``.
        tails: table rows at the end of each pooled request, ``[pooled, taps - 1]``.
        order: of each of this rank's segments, the request's position among the pooled.
        cu_seqlens: this rank's segments among its own rows, ``[segments + 1]``.
    """

    send_rows: torch.Tensor
    halos: torch.Tensor
    tails: torch.Tensor
    order: torch.Tensor
    cu_seqlens: torch.Tensor


def run(call: CoreCall) -> None:
    """Run the layer's core on this rank's rows, from the state that the other ranks' rows lead to."""
    call.begin()
    step, plan, states, slots = call.step, call.step.plan, call.states, call.pooled_slots
    at = step.once("two_pass", lambda: _indices(call))
    halos, tails = _exchange_tails(call, at)
    ends, maps = _exchange_states(call, at, halos)
    entering, final = compose(plan, ends, maps)
    if call.metadata.pooled is not None:
        if step.rank in entering:
            first = slots[at.order[:1]]
            states.write(first, halos[:1], entering[step.rank][None])
        call.run(call.metadata.pooled, step.own_rows)
    # The owner of a request's end has another rounding of its state; all ranks go on with the same bits.
    states.write(slots, tails, final)


def _exchange_tails(call: CoreCall, at: _Indices) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows before this rank's segments and at the end of every request, ``[n, channels, taps - 1]``."""
    earlier = call.states.conv[call.pooled_slots].transpose(1, 2).flatten(0, 1)
    sent = call.step.group.all_gather(call.mixed_qkv[at.send_rows], dim=0)
    table = torch.cat([sent, earlier.to(sent.dtype)])
    return table[at.halos].transpose(1, 2), table[at.tails].transpose(1, 2)


def _exchange_states(call: CoreCall, at: _Indices, halos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`compose` takes, of all ranks."""
    plan, rank, shape = call.step.plan, call.step.rank, call.shape
    heads, value_size, key_size = shape.value_heads, shape.value_size, shape.key_size
    count = states_per_rank(plan)
    send = torch.zeros(count * value_size + key_size, heads * key_size, dtype=torch.float32, device=halos.device)
    own_ends = send[: count * value_size].view(count, heads, value_size, key_size)
    own_map = send[count * value_size :].view(heads, key_size, key_size)
    if plan.segments(rank):
        ends, maps = _first_pass(call, at, halos)
        begun = int(plan.receives_state(rank))  # the segments from here on begin a request
        starts = call.states.recurrent[call.pooled_slots[at.order[begun:]]].float()
        own_ends[: len(ends)] = ends
        own_ends[begun : len(ends)] += starts @ maps[begun:]
        own_map.copy_(maps[0])
    call.trace("rank %d sends %d bytes of states", rank, send.numel() * send.element_size())
    received = call.step.group.all_gather(send[None], dim=0)
    ends, maps = received.split([count * value_size, key_size], dim=1)
    return (
        ends.reshape(plan.world_size, count, heads, value_size, key_size),
        maps.reshape(plan.world_size, heads, key_size, key_size),
    )


def _first_pass(call: CoreCall, at: _Indices, halos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of this rank's segments, the state it leaves from zero, and its map; float32."""
    layer, own = call.layer, call.step.own_rows
    segments = len(at.order)
    return gdn_prefill_segment(
        call.mixed_qkv[own],
        call.a[own],
        call.b[own],
        conv_weight=call.conv_weight,
        conv_bias=layer.conv1d.bias,
        conv_state=halos.contiguous(),
        slots=torch.arange(segments, device=halos.device),
        has_initial_state=torch.ones(segments, dtype=torch.bool, device=halos.device),
        cu_seqlens=at.cu_seqlens,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        key_heads=call.shape.key_heads,
        key_size=call.shape.key_size,
        activation=layer.activation,
        null_slot=None,
    )


def _indices(call: CoreCall) -> _Indices:
    plan: PcpPlan = call.step.plan
    rank = call.step.rank
    exchange = TailExchange.of(plan, call.shape.taps - 1)
    segments = plan.segments(rank)
    first, _ = plan.slice_bounds(rank)
    starts = [plan.pool_start_loc[plan.group_order[s.request]] + s.start - first for s in segments]
    ends = [start + s.rows for start, s in zip(starts, segments, strict=True)]
    return _Indices(
        send_rows=call.index(exchange.send_rows[rank]),
        halos=call.index(exchange.halos[rank]),
        tails=call.index(exchange.tails),
        order=call.index([plan.group_order[s.request] for s in segments]),
        cu_seqlens=call.index([0, *ends]),
    )
