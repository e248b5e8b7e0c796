"""A layer's recurrence in SGLang: besides the outputs, snapshots of states for SGLang's prefix cache.

SGLang can cache prefixes of hybrid models by keeping, in slots of their own, the states at a multiple of its chunk
size. For a prefill that boundary may lie in the middle of a sequence's rows: then the rows before it and those behind
it are run one after the other, and the states in between are copied.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from atom_patches.runtime import context
from atom_patches.runtime.gdn import GdnBinding, LayerStates
from atom_patches.sglang.adapters.current import current_batch
from atom_patches.sglang.adapters.gdn_binding import linear_backend, planned_mode
from atom_patches.sglang.adapters.server_args import mamba_cache_chunk_size

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(mixed projections [rows, channels], a [rows, heads], b [rows, heads]) to outputs [rows, heads, value size]."""
RESERVED_SLOT = 0
"""SGLang gives it to no request: padding is written there."""


class Recurrence:
    """One layer's, of the decoder's own: what it computes, and when SGLang wants its states copied."""

    def __init__(self, layer: int, run: Run) -> None:
        self._layer = layer
        self._run = run

    def __call__(self, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        batch = current_batch()
        if batch.mamba_track_mask is None or batch.forward_mode.is_idle():
            return self._run(mixed, a, b)
        backend = linear_backend()
        assert backend is not None
        if planned_mode(batch).is_decode():
            return self._decode(batch, backend, mixed, a, b)
        if backend.forward_metadata.has_mamba_track_mask and not batch.forward_mode.is_target_verify():
            return self._prefill(batch, mixed, a, b)
        return self._run(mixed, a, b)

    def _decode(self, batch: ForwardBatch, backend: Any, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        output = self._run(mixed, a, b)
        binding = context.current_gdn()
        states = binding.states(self._layer)
        backend._track_mamba_state_decode(batch, states.conv, states.temporal, binding.slots, self._layer)
        return output

    def _prefill(self, batch: ForwardBatch, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        binding = context.current_gdn()
        before, behind = split_at(binding, boundaries(batch, binding))
        with context.bind_gdn(before):
            output = self._run(mixed, a, b)
        keep_snapshots(batch, binding, binding.states(self._layer))
        with context.bind_gdn(behind):
            return output + self._run(mixed, a, b)  # each leaves zeros in the other's rows


def keep_snapshots(batch: ForwardBatch, binding: GdnBinding, states: LayerStates) -> None:
    """Copy the states of the sequences that SGLang wants a snapshot of; the host does not wait to learn which.

    The others' are written where they lie, which nobody else writes; padding's, to the slot that SGLang keeps for it.
    """
    count = binding.sequences
    own = binding.slots.clamp(min=RESERVED_SLOT).long()
    kept = torch.where(batch.mamba_track_mask[:count], batch.mamba_track_indices[:count], own)
    states.conv[kept] = states.conv[own]
    states.temporal[kept] = states.temporal[own]


def boundaries(batch: ForwardBatch, binding: GdnBinding) -> Tensor:
    """Rows of each sequence before its snapshot; all of them where none is taken."""
    lengths = binding.query_start_loc.diff()
    chunk = mamba_cache_chunk_size(get_server_args())
    wanted = batch.mamba_track_seqlens[: binding.sequences] - batch.extend_prefix_lens[: binding.sequences]
    snapshot = torch.minimum(wanted // chunk * chunk, lengths).to(lengths.dtype)
    return torch.where(batch.mamba_track_mask[: binding.sequences], snapshot, lengths)


def split_at(binding: GdnBinding, rows: Tensor) -> tuple[GdnBinding, GdnBinding]:
    """Two bindings of all rows, which run the first `rows[i]` of each prefilled sequence, and the others.

    Every sequence becomes two, of which the one that is not run is padding.
    """
    starts = binding.query_start_loc
    cuts = torch.stack([starts[:-1], starts[:-1] + rows], dim=1).flatten()
    both = torch.cat([cuts, starts[-1:]]).to(starts.dtype)
    padding = torch.full_like(binding.slots, -1)
    first = dataclasses.replace(
        binding,
        query_start_loc=both,
        slots=torch.stack([binding.slots, padding], dim=1).flatten(),
        has_initial_state=binding.has_initial_state.repeat_interleave(2),
        prefills=2 * binding.prefills,
    )
    second = dataclasses.replace(
        first,
        slots=torch.stack([padding, binding.slots], dim=1).flatten(),
        has_initial_state=torch.stack([binding.has_initial_state, binding.has_initial_state | (rows > 0)], 1).flatten(),
    )
    return first, second
