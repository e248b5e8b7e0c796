"""GatedDeltaNet layers in a split step.

Two ways to run the same recurrence, chosen by ``ATOM_PCP_GDN``:

- ``relay``: each rank scans its own rows. Where a cut falls inside a request, the rank before the cut hands the
  convolution tail and the recurrent state to the rank after it, which goes on from there, exactly as the engine
  goes on after a prefill chunk. What is sent does not depend on the prompt's length.
- ``redundant``: every rank gathers all rows and scans the whole step. The oracle.

Afterwards every rank holds the final state of every request, so decodes and later chunks need nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from atom_patches.core import settings
from atom_patches.vllm.adapters.pcp_step import RecurrentMetadata, SplitStep, layer_metadata, logger

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn_linear_attn import GatedDeltaNetAttention
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

ForwardCore = Callable[..., None]


def forward_core(
    original: ForwardCore,
    layer: GatedDeltaNetAttention,
    step: SplitStep,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:
    """Convolution and recurrence of one layer for this rank's rows.

    Args:
        original: the engine's own ``_forward_core``.
        mixed_qkv: ``[rows_per_rank, conv_dim]``, before the convolution.
        b, a: ``[rows_per_rank, v_heads]``, the gates' inputs.
        core_attn_out: ``[rows_per_rank, v_heads, v_head_dim]``, written in place.
    """
    if settings.pcp_gdn() == "redundant":
        _redundant(original, layer, step, mixed_qkv, b, a, core_attn_out)
    else:
        _relay(original, layer, step, mixed_qkv, b, a, core_attn_out)


def _redundant(
    original: ForwardCore,
    layer: GatedDeltaNetAttention,
    step: SplitStep,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:
    widths = [mixed_qkv.shape[1], b.shape[1], a.shape[1]]
    whole_qkv, whole_b, whole_a = step.gather(torch.cat([mixed_qkv, b, a], dim=1)).split(widths, dim=1)
    whole_out = core_attn_out.new_zeros((step.plan.num_tokens, *core_attn_out.shape[1:]))
    whole = step.recurrent[layer.prefix].whole
    _run(original, layer, whole, whole_qkv.contiguous(), whole_b.contiguous(), whole_a.contiguous(), whole_out)
    core_attn_out.copy_(whole_out[step.local_rows])


def _relay(
    original: ForwardCore,
    layer: GatedDeltaNetAttention,
    step: SplitStep,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:
    metadata = step.recurrent[layer.prefix]
    states = StateSlots(layer.kv_cache)
    replicated, own = slice(step.num_replicated), step.own_rows
    tensors = (mixed_qkv, b, a, core_attn_out)
    # A request of one row counts as a decode, and a decode goes on from what its slot holds.
    states.clear(metadata.fresh)
    if metadata.replicated is not None:
        _run(original, layer, metadata.replicated, *(tensor[replicated] for tensor in tensors))
    if metadata.pooled is not None:
        _receive_state(step, metadata, states)
        _run(original, layer, metadata.pooled, *(tensor[own] for tensor in tensors))
        _send_state(layer, step, metadata, states)
    _share_final_states(step, metadata, states)


def _run(
    original: ForwardCore,
    layer: GatedDeltaNetAttention,
    metadata: GDNAttentionMetadata,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:
    with layer_metadata(layer.prefix, metadata):
        original(layer, mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)


def _receive_state(step: SplitStep, metadata: RecurrentMetadata, states: StateSlots) -> None:
    if not step.plan.receives_state(step.rank):
        return
    request = step.plan.segments(step.rank)[0].request
    packed = step.group.recv(states.packed_size(1), torch.uint8, src=step.rank - 1)
    states.unpack(metadata.slots[request : request + 1], packed)


def _send_state(
    layer: GatedDeltaNetAttention, step: SplitStep, metadata: RecurrentMetadata, states: StateSlots
) -> None:
    if not step.plan.sends_state(step.rank):
        return
    request = step.plan.segments(step.rank)[-1].request
    packed = states.pack(metadata.slots[request : request + 1])
    step.group.send(packed, dst=step.rank + 1)
    if settings.pcp_debug():
        logger.info("%s: rank %d relays %d bytes of state", layer.prefix, step.rank, packed.numel())


def _share_final_states(step: SplitStep, metadata: RecurrentMetadata, states: StateSlots) -> None:
    """Each rank broadcasts the states of the requests whose last rows it ran."""
    for owner in range(step.plan.world_size):
        finished = step.plan.finished(owner)
        if not finished:
            continue
        slots = metadata.slots[list(finished)]
        if owner == step.rank:
            packed = states.pack(slots)
        else:
            packed = torch.empty(states.packed_size(len(finished)), dtype=torch.uint8, device=slots.device)
        step.group.broadcast(packed, src=owner)
        if owner != step.rank:
            states.unpack(slots, packed)


class StateSlots:
    """A layer's convolution and recurrent states, one slot a request, and their transport form.

    Args:
        kv_cache: the layer's state tensors, each ``[slots, ...]``.
    """

    def __init__(self, kv_cache: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
        self._tensors = tuple(kv_cache)
        self._slot_bytes = [t[0].numel() * t.element_size() for t in self._tensors]

    def packed_size(self, slots: int) -> torch.Size:
        """Shape of ``slots`` packed states: bytes of uint8."""
        return torch.Size([slots, sum(self._slot_bytes)])

    def clear(self, slots: torch.Tensor) -> None:
        """Set the states of ``slots`` (int64) to zero."""
        for tensor in self._tensors:
            tensor[slots] = 0

    def pack(self, slots: torch.Tensor) -> torch.Tensor:
        """The states of ``slots`` (int64 ``[n]``) as uint8 ``[n, bytes]``."""
        return torch.cat([t[slots].reshape(len(slots), -1).view(torch.uint8) for t in self._tensors], dim=1)

    def unpack(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Write packed states, uint8 ``[n, bytes]``, to ``slots`` (int64 ``[n]``)."""
        for tensor, part in zip(self._tensors, packed.split(self._slot_bytes, dim=1), strict=True):
            tensor[slots] = part.contiguous().view(tensor.dtype).view(len(slots), *tensor.shape[1:])
