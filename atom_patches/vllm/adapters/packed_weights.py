"""Weights of linear layers that vLLM's CPU platform has packed for its kernels and dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def give_back(layer: Any, dtype: torch.dtype) -> None:
    """Set a layer's weights `[outputs, inputs]` anew, if they are gone, to what it multiplies by.

    Products with 1 are exact, and with 0 they are 0: a sum of one value and zeros is that value.
    """
    weight = getattr(layer, "weight", None)
    if weight is None or weight.numel():
        return
    identity = torch.eye(layer.input_size_per_partition, dtype=dtype)
    packed = layer.quant_method.apply(layer, identity)
    layer.weight = nn.Parameter(packed.T.contiguous(), requires_grad=False)
