"""Find where the host would wait for a GPU, without one: shapes and devices are computed, values are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda")

READS = {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero"}
"""Operations that give the host values."""

INDEXED = {"aten.index", "aten.index_put", "aten.index_put_"}
"""Operations that copy to the GPU what they are given on the host."""


class _Waits(TorchDispatchMode):
    """Records operations that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.pinned: list[torch.Tensor] = []

    def pin_memory(self, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """In place of torch's, which takes no fake tensors."""
        self.pinned.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        if name in READS and args[0].device.type == GPU.type:
            self.found.append(name)
        if name in ("aten._to_copy", "aten.copy_"):
            source = args[1] if name == "aten.copy_" else args[0]
            crosses = source.device.type != result.device.type
            waits = not (kwargs or {}).get("non_blocking") or not any(source is one for one in self.pinned)
            if crosses and waits:
                self.found.append(f"{name} of {list(source.shape)} from {source.device.type}")
        if name in INDEXED and args[0].device.type == GPU.type:
            self.found += [f"{name} with {what} from the host" for what in _from_host(*args[1:3])]
        return result


def _from_host(indices: list[torch.Tensor | None], values: Any = None) -> list[str]:
    """What an indexed read or write takes from the host, by a copy that waits."""
    places = [index for index in indices if index is not None]
    found = ["places" for index in places if index.device.type != GPU.type]
    # A number at the places of a mask is an argument of the kernel; at places by number it is copied first.
    filled = isinstance(values, torch.Tensor) and values.dim() == 0 and all(i.dtype == torch.bool for i in places)
    if isinstance(values, torch.Tensor) and values.device.type != GPU.type and not filled:
        found.append("values")
    return found


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Run what is within on fake tensors; gives where the host would wait for those on `GPU`.

    Unpinned memory counts, since a copy from it may wait.
    """
    waits = _Waits()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        waits,
        patch.object(torch.Tensor, "pin_memory", lambda tensor, *args: waits.pin_memory(tensor, *args)),
    ):
        yield waits.found
