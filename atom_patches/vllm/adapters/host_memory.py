"""Copies between raw host addresses."""

from __future__ import annotations

import ctypes

from torch import Tensor


def copy_ranges(sources: Tensor, targets: Tensor, sizes: Tensor) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to address `targets[i]`, for every i.

    Args:
        sources, targets: [N] int64 host addresses.
        sizes: [N] integers, bytes. Ranges of one pair may overlap; pairs do not depend on each other.
    """
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
