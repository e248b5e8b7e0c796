"""Small tensors on their way to the device while the host goes on."""

from __future__ import annotations

from typing import Any

import torch


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = torch.int64) -> torch.Tensor:
    """A tensor of the host's values that the host does not wait for.

    A copy from ordinary memory may wait until the device has run all that it was given before.

    Args:
        values: a tensor on the host, or numbers.
        dtype: of the result; None keeps that of the values.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
