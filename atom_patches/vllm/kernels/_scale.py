"""The scale of a cache that has none, which vLLM's cache writes want as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_ones: dict[torch.device, Tensor] = {}


def one(device: torch.device) -> Tensor:
    """A float32 tensor [1] that holds 1; kept, unless it is made in a CUDA graph's capture, in its memory."""
    if device not in _ones:
        made = torch.ones(1, dtype=torch.float32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return made
        _ones[device] = made
    return _ones[device]
