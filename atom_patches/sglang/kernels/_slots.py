"""What SGLang's kernels expect to be told about a batch, from the operators' arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from atom_patches.kernels.registry import YES, Verdict, no


def without_null(slots: Tensor, null_slot: int | None) -> Tensor:
    """int32 slots in which padding is -1: no other slot stands for "none" in SGLang."""
    padding = slots < 0 if null_slot is None else (slots < 0) | (slots == null_slot)
    return torch.where(padding, -1, slots).to(torch.int32)


def padded_rows(cu_seqlens: Tensor, slots: Tensor, rows: int) -> Tensor:
    """[T] bool: the rows of padding sequences (-1), and those that no sequence owns."""
    row = torch.arange(rows, device=cu_seqlens.device)
    owner = torch.searchsorted(cu_seqlens, row, right=True) - 1
    padding = torch.cat([slots < 0, slots.new_ones(1, dtype=torch.bool)])
    return padding[owner.clamp(min=0, max=slots.shape[0])] | (owner < 0)


class Batch(NamedTuple):
    """Sequences as SGLang has them on the host before its layers run."""

    lengths: list[int]
    bounds: Tensor
    """A copy of cu_seqlens: SGLang keeps its table of chunks by the tensor, whatever has been written to it since."""


_batches: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def batch_of(cu_seqlens: Tensor) -> Batch:
    """Read once a tensor, and kept while it is unchanged; an inference tensor does not tell, and is read anew."""
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    kept = _batches.get(cu_seqlens)
    if kept is not None and version is not None and kept[0] == version:
        return kept[1]
    found = Batch(cu_seqlens.diff().tolist(), cu_seqlens.clone(memory_format=torch.contiguous_format))
    if version is not None:
        _batches[cu_seqlens] = (version, found)
    return found


def supports_batch(cu_seqlens: Tensor) -> Verdict:
    """Whether there is a batch, and its lengths can be read now."""
    if cu_seqlens.shape[0] < 2:
        return no("SGLang's kernels are not launched without sequences")
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return no("SGLang plans a prefill on the host, outside CUDA graphs")
    return YES


def without_empty(cu_seqlens: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Bounds, and what goes with every sequence, of those that have rows: SGLang's table of chunks counts no others."""
    batch = batch_of(cu_seqlens)
    if all(batch.lengths):
        return batch.bounds, *vectors
    filled = torch.tensor([i for i, length in enumerate(batch.lengths) if length], device=cu_seqlens.device).long()
    return torch.cat([batch.bounds[:1], batch.bounds[1:][filled]]), *(vector[filled] for vector in vectors)
