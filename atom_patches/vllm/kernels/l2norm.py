"""vLLM's L2 normalisation."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.fla.ops.l2norm import l2norm_fwd

from atom_patches.kernels.registry import YES, Verdict, no


def supports_l2norm(x: Tensor, eps: float) -> Verdict:
    if x.numel() == 0:
        return no("vLLM launches no kernel for zero rows")
    return YES if x.is_contiguous() else no("vLLM's kernel reads contiguous rows only")


def l2norm(x: Tensor, eps: float) -> Tensor:
    return l2norm_fwd(x, eps)
