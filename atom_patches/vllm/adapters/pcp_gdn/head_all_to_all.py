"""Each rank runs all rows of its share of the heads.

Heads do not know of each other, so each is computed as one rank would, with no composition of states. What is
exchanged, a rank's rows before the convolution and the outputs after the scan, grows with the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_patches.kernels.gdn_chain import gdn_prefill
from atom_patches.runtime.pcp_gdn import head_channels
from atom_patches.runtime.pcp_gdn_memory import PACKED_BYTES
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall


@dataclass(frozen=True)
class _Share:
    """What all layers of a step share, on the device.

    Attributes:
        channels: of each rank's heads, ``[ranks, channels / ranks]``.
        heads: this rank's value heads.
        cu_seqlens: the pooled requests in the pool, ``[pooled + 1]``.
    """

    channels: torch.Tensor
    heads: slice
    cu_seqlens: torch.Tensor


def run(call: CoreCall) -> None:
    """Run the layer's core on all rows of this rank's heads."""
    call.begin()
    share = call.step.once("head_all_to_all", lambda: _share(call))
    conv = call.states.conv[call.pooled_slots[:, None], share.channels[call.step.rank]]
    recurrent = call.states.recurrent[:, share.heads][call.pooled_slots]
    output = _scan(call, share, *_rows_of_own_heads(call, share), conv, recurrent)
    _return_rows(call, output)
    many = max(1, PACKED_BYTES // call.shape.slot_bytes)
    for some in zip(call.pooled_slots.split(many), conv.split(many), recurrent.split(many), strict=True):
        _share_final_states(call, share, *some)


def _rows_of_own_heads(call: CoreCall, share: _Share) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pool's rows before the convolution, and their gates, of this rank's heads."""
    step, ranks = call.step, call.step.plan.world_size
    pooled = slice(step.num_replicated, None)
    parts = [call.mixed_qkv[pooled][:, share.channels]]
    parts += [gate[pooled].unflatten(1, (ranks, -1)) for gate in (call.b, call.a)]
    widths = [part.shape[2] for part in parts]
    # [rows of this rank, ranks, width] -> [ranks, rows of each, width]
    received = _all_to_all(call, torch.cat(parts, dim=2).transpose(0, 1))
    pool = received.flatten(0, 1)[: step.plan.pool_size]
    mixed_qkv, b, a = pool.split(widths, dim=1)
    return mixed_qkv.contiguous(), b.contiguous(), a.contiguous()


def _scan(
    call: CoreCall,
    share: _Share,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
) -> torch.Tensor:
    """Convolution and scan of the pool; ``conv`` and ``recurrent`` become the final states."""
    layer = call.layer
    channels = share.channels[call.step.rank]
    bias = layer.conv_bias
    requests = len(conv)
    return gdn_prefill(
        mixed_qkv,
        a,
        b,
        conv_weight=layer.conv_weight[channels],
        conv_bias=None if bias is None else bias[channels],
        conv_state=conv,
        ssm_state=recurrent,
        slots=torch.arange(requests, device=conv.device),
        has_initial_state=torch.ones(requests, dtype=torch.bool, device=conv.device),
        cu_seqlens=share.cu_seqlens,
        A_log=layer.A_log[share.heads],
        dt_bias=layer.dt_bias[share.heads],
        activation=layer.activation,
        null_slot=None,
    )


def _return_rows(call: CoreCall, output: torch.Tensor) -> None:
    """Send the outputs ``[pool size, heads of this rank, V]`` to the ranks of their rows."""
    step, plan = call.step, call.step.plan
    padded = output.new_zeros(plan.world_size * plan.slice_size, *output.shape[1:])
    padded[: plan.pool_size] = output
    received = _all_to_all(call, padded.unflatten(0, (plan.world_size, -1)))
    own = call.core_attn_out[step.own_rows]
    own.copy_(received.transpose(0, 1).flatten(1, 2)[: len(own)])


def _share_final_states(
    call: CoreCall, share: _Share, slots: torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor
) -> None:
    """Gather some requests' states of all heads, and write them to their slots."""
    parts = [tensor.flatten(1).view(torch.uint8) for tensor in (conv, recurrent)]
    received = call.step.group.all_gather(torch.cat(parts, dim=1)[None], dim=0)
    found = [
        part.contiguous().view(tensor.dtype).view(len(received), *tensor.shape).transpose(0, 1).flatten(1, 2)
        for part, tensor in zip(received.split([p.shape[1] for p in parts], dim=2), (conv, recurrent), strict=True)
    ]
    whole_conv = torch.empty_like(found[0])
    whole_conv[:, share.channels.flatten()] = found[0]
    call.states.write(slots, whole_conv, found[1])


def _all_to_all(call: CoreCall, parts: torch.Tensor) -> torch.Tensor:
    """Part ``[r]`` goes to rank r; ``[r]`` of the result came from rank r."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=call.step.group.device_group)
    call.trace("rank %d exchanges %d bytes of rows", call.step.rank, sent.numel() * sent.element_size())
    return received


def _share(call: CoreCall) -> _Share:
    plan, rank, shape = call.step.plan, call.step.rank, call.shape
    channels = head_channels(shape.key_heads, shape.value_heads, shape.key_size, shape.value_size, plan.world_size)
    heads = shape.value_heads // plan.world_size
    return _Share(call.index(channels), slice(rank * heads, (rank + 1) * heads), call.index(plan.pool_start_loc))
