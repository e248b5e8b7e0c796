"""Scale the last dimension to unit length: y = x / sqrt(sum(x^2) + eps).

eps is added to the sum of squares, under the root, as both transformers and the Triton kernels of the
engines do; a row of zeros therefore stays zeros.

Schema, D values a row: x [..., D], floating, any strides; y in x's dtype and shape, contiguous. Computed in float32 and
rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from a float64 formula, per input dtype.
TOLERANCE = {"float32": (1e-5, 1e-7), "bfloat16": (8e-3, 1e-3), "float16": (1e-3, 1e-4)}


def _fake(x: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shape_class(x: Tensor, eps: float) -> str:
    rows = bucket(x.numel() // max(1, x.shape[-1]), (64, 1024, 16384))
    return f"{dtype_name(x.dtype)} d{x.shape[-1]} rows{rows}"


L2NORM = Operation(
    package=__name__,
    name="l2norm",
    schema="(Tensor x, float eps) -> Tensor",
    reference=reference.l2norm,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
)
OPERATIONS = (L2NORM,)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x [..., D] with every row scaled to unit length, in x's dtype (eps under the root)."""
    return L2NORM(x, eps)


__all__ = ["L2NORM", "OPERATIONS", "TOLERANCE", "l2norm"]
