"""SGLang's L2 normalisation.

Written against SGLang 0.5.17.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd
from torch import Tensor

from atom_patches.kernels.registry import YES, Verdict, no


def supports_l2norm(x: Tensor, eps: float) -> Verdict:
    if x.numel() == 0:
        return no("SGLang launches no kernel for zero rows")
    return YES if x.is_contiguous() else no("SGLang's kernel reads contiguous rows only")


def l2norm(x: Tensor, eps: float) -> Tensor:
    return l2norm_fwd(x, eps)
