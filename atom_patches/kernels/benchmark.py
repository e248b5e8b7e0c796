"""What is measured: every family's `bench.py` lists its cases in `CASES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from atom_patches.kernels.registry import Operation


@dataclass(frozen=True)
class Case:
    """One call of one operator, at a shape that a served model has.

    `inputs(device)` returns a tuple of the schema's arguments, in order, freshly allocated on `device`, from a generator
    with a fixed seed; on the meta device it returns the same shapes (index tensors hold no data there). `bytes` and
    `flops` are the least that any implementation has to move and to compute: every input read once, every output
    written once, in the arguments' dtypes; of a cache or a state only what the call touches.
    """

    operation: Operation
    label: str
    inputs: Callable[[torch.device], tuple[Any, ...]]
    bytes: float
    flops: float
    note: str = ""
