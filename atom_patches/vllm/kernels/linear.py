"""vLLM's product with weights as they are stored: what its linear layers call on this platform."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

from atom_patches.kernels.registry import YES, Verdict, no

_NO_LAYER = torch.nn.Module()
"""vLLM's products on GPUs take a layer, and look only at the weights beside it."""


def supports_linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Verdict:
    if x.numel() == 0:
        return no("vLLM's products are not called with zero rows")
    return YES


def linear(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    return dispatch_unquantized_gemm()(_NO_LAYER, x, weight, None)
