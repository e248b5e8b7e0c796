"""A scan of this rank's rows from the states in their slots.

The engine's own core does it, unless one of this package's kernels is chosen for the call: the environment names it, or
it was measured to be faster (`kernels/registry.py`). Then the rows of a split step are computed by another kernel than
those of a whole one: the same recurrence, in another order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atom_patches.kernels import registry
from atom_patches.kernels.gdn_chain import GDN_PREFILL
from atom_patches.vllm.adapters.pcp_gdn.core_call import CoreCall

NOT_OURS = ("engine", "torch")
"""The engine's core does what the first of these binds, and no reference is wanted where there is a core."""


@dataclass(frozen=True)
class OwnSegments:
    """This rank's segments, on the device; what all layers of a step share.

    Attributes:
        order: of each segment, the request's position among the pooled.
        cu_seqlens: where each begins among the rank's own rows, and their number.
        resumed: all true: a request without earlier tokens has a state of zeros by then.
    """

    order: torch.Tensor
    cu_seqlens: torch.Tensor
    resumed: torch.Tensor


def own_segments(call: CoreCall) -> OwnSegments:
    """The segments of the call's step."""
    return call.step.once("own segments", lambda: _own_segments(call))


def scan_own_rows(call: CoreCall) -> None:
    """Run the layer on this rank's segments, of which there are some; the states after them are in their slots."""
    metadata, rows = call.metadata.pooled, call.step.own_rows
    assert metadata is not None, "a rank without rows of the pool has nothing to scan"
    arguments = _arguments(call)
    provider = call.step.once("own rows by", lambda: registry.choose(GDN_PREFILL, arguments).provider)
    if provider in NOT_OURS:
        call.run(metadata, rows)
    else:
        call.core_attn_out[rows] = GDN_PREFILL(*arguments)
    call.trace("rank %d scans its own rows by %s", call.step.rank, provider)


def _arguments(call: CoreCall) -> tuple[Any, ...]:
    """What `gdn_prefill` takes."""
    layer, states, segments = call.layer, call.states, own_segments(call)
    rows = call.step.own_rows
    return (
        call.mixed_qkv[rows], call.a[rows], call.b[rows], layer.conv_weight, layer.conv_bias, states.conv,
        states.recurrent, call.pooled_slots[segments.order], segments.resumed, segments.cu_seqlens, layer.A_log,
        layer.dt_bias, call.shape.key_size**-0.5, 1e-6, layer.activation, None,
    )  # fmt: skip


def _own_segments(call: CoreCall) -> OwnSegments:
    plan, rank = call.step.plan, call.step.rank
    segments = plan.segments(rank)
    first, _ = plan.slice_bounds(rank)
    starts = [plan.pool_start_loc[plan.group_order[s.request]] + s.start - first for s in segments]
    ends = [start + s.rows for start, s in zip(starts, segments, strict=True)]
    order = call.index([plan.group_order[s.request] for s in segments])
    return OwnSegments(order, call.index([0, *ends]), torch.ones(len(segments), dtype=torch.bool, device=order.device))
