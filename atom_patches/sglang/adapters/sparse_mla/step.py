"""What all layers of one step share: who sees how much, in which pages, and where new tokens go.

Made once a step from SGLang's request-to-token table; layers read it and change nothing.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atom_patches.models.lightning_indexer import RaggedKeys, Selection
from atom_patches.runtime.sparse_plan import (
    Workspace,
    boundaries,
    owners_of,
    page_table,
    pages_for,
    prefill_groups,
    visible_lengths,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class Everything:
    """Every row sees all that is before it: no request has more tokens than may be selected.

    Attributes:
        table: [requests, pages] int32.
        cu_seqlens_q: [requests + 1] int32.
        seq_lens_k: [requests] int32.
    """

    table: Tensor
    cu_seqlens_q: Tensor
    seq_lens_k: Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class SparseStep:
    """One of `everything` and `selection` is there.

    Attributes:
        slots: [rows] where each row's key goes, negative for padding.
    """

    slots: Tensor
    everything: Everything | None
    selection: Selection | None


@dataclass(frozen=True)
class Tables:
    """SGLang's request-to-token table, and how it is read.

    Attributes:
        slots_of: [requests of the pool, tokens] int32.
    """

    slots_of: Tensor
    page_size: int
    top_k: int
    workspace: Workspace

    def eager(self, batch: ForwardBatch) -> SparseStep | None:
        """The plan of a step that no graph holds, with lengths that the host knows; None on a rank that is idle."""
        if batch.forward_mode.is_idle():
            return None
        slots = _real(batch.out_cache_loc)
        per_request = _rows_per_request(batch)
        if per_request is None:
            return self._prefill(batch, slots)
        more = per_request if batch.forward_mode.is_target_verify() else 0
        longest = int(batch.seq_lens_cpu.max()) + more
        if longest > self.top_k:
            return SparseStep(slots, None, self._uniform(batch, per_request, longest))
        lengths = (batch.seq_lens + more).int()
        starts = _numbers(batch.batch_size + 1, slots.device) * per_request
        return SparseStep(slots, self._everything(batch, starts, lengths, per_request, longest), None)

    def captured(self, batch: ForwardBatch) -> SparseStep:
        """The plan of a decode or verification step within a graph: nothing depends on values, so it is replayed."""
        per_request = _rows_per_request(batch)
        assert per_request is not None, f"{batch.forward_mode} is not captured"
        return SparseStep(_real(batch.out_cache_loc), None, self._uniform(batch, per_request, self.slots_of.shape[1]))

    def _uniform(self, batch: ForwardBatch, per_request: int, longest: int) -> Selection:
        """Every request has so many rows, its last tokens."""
        pages = pages_for(longest, self.page_size)
        if self.page_size == 1:  # a page is a token: the engine's table is the page table
            table, lines = page_table(self.slots_of, None, pages, 1), batch.req_pool_indices.int()
        else:
            table, lines = page_table(self.slots_of, batch.req_pool_indices, pages, self.page_size), None
        ends = batch.seq_lens.int()
        if batch.forward_mode.is_target_verify():  # drafts are not counted yet; the first of them sees one token more
            lines = _numbers(batch.batch_size, table.device) if lines is None else lines
            lines = lines.repeat_interleave(per_request)
            ends = (ends[:, None] + _numbers(per_request, table.device) + 1).flatten()
        return Selection(batch.batch_size * per_request, table, lines, ends, longest, None)

    def _prefill(self, batch: ForwardBatch, slots: Tensor) -> SparseStep:
        counts, lengths = list(batch.extend_seq_lens_cpu), batch.seq_lens_cpu.tolist()
        rows, longest = sum(counts), max(lengths)
        if longest <= self.top_k:
            everything = self._everything(
                batch, boundaries(batch.extend_seq_lens), batch.seq_lens.int(), max(counts), longest
            )
            return SparseStep(slots, everything, None)
        table = page_table(self.slots_of, batch.req_pool_indices, pages_for(longest, self.page_size), self.page_size)
        owners = owners_of(batch.extend_seq_lens, rows)
        visible = visible_lengths(owners, batch.extend_seq_lens, batch.seq_lens)
        ragged = self._gathered(batch, counts, lengths, table, owners, visible)
        return SparseStep(slots, None, Selection(rows, table, owners, visible, longest, ragged))

    def _gathered(
        self,
        batch: ForwardBatch,
        counts: list[int],
        lengths: list[int],
        table: Tensor,
        owners: Tensor,
        visible: Tensor,
    ) -> tuple[RaggedKeys, ...]:
        bounds = boundaries(batch.seq_lens)
        begins = bounds[owners.long()]
        found: list[RaggedKeys] = []
        for group in prefill_groups(counts, lengths, self.workspace):
            starts = begins - bounds[group.first]
            of_group = bounds[group.first : group.last + 1] - bounds[group.first]
            keys = table[group.first : group.last]
            found.append(RaggedKeys(keys, of_group, group.keys, group.chunks, starts, starts + visible))
        return tuple(found)

    def _everything(
        self, batch: ForwardBatch, starts: Tensor, lengths: Tensor, longest_q: int, longest_k: int
    ) -> Everything:
        pages = pages_for(longest_k, self.page_size)
        table = page_table(self.slots_of, batch.req_pool_indices, pages, self.page_size)
        return Everything(table, starts, lengths, longest_q, longest_k)


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _rows_per_request(batch: ForwardBatch) -> int | None:
    """How many rows every request has in a step that decodes or verifies, None in one that fills."""
    mode = batch.forward_mode
    if mode.is_decode():
        return 1
    if mode.is_target_verify():
        return batch.spec_info.draft_token_num  # rows of padding need not be as many for each request
    return None


def _real(slots: Tensor) -> Tensor:
    """SGLang's pools keep slot 0 for padding; here padding is negative, and is not written."""
    return slots.masked_fill(slots == 0, -1)
