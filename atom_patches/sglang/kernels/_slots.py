"""What SGLang's kernels expect to be told about a batch, from the operators' arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


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


_lengths: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def lengths_on_host(cu_seqlens: Tensor) -> list[int]:
    """The sequences' lengths. SGLang has them on the host before its layers run; here they are read once a tensor."""
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    kept = _lengths.get(cu_seqlens)
    if kept is not None and version is not None and kept[0] == version:
        return kept[1]
    found = cu_seqlens.diff().tolist()
    _lengths[cu_seqlens] = (version, found)
    return found
