"""State slots: which entries name a state, and which are padding."""

from __future__ import annotations

from torch import Tensor


def is_real(slots: Tensor, null_slot: int | None) -> Tensor:
    """Whether each of slots (integers, any shape) names a state: it is neither negative nor `null_slot`."""
    return slots >= 0 if null_slot is None else (slots >= 0) & (slots != null_slot)
