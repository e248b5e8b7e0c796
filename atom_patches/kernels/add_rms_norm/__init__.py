"""Add a layer's output to the residual stream and normalise the sum, reading and writing each once.

    new_residual = x + residual        y = rms_norm(new_residual, w)

Schema, D values a row: x, residual [..., D] of one dtype, floating, any strides; weight [D], floating; y and
new_residual in x's dtype and shape, contiguous, and memory of their own: neither input is written to. The sum is
rounded to x's dtype first and the norm is that of the rounded sum, so that it can be recomputed from the residual
stream. With `gemma` the factor is 1 + w. Computed in float32.

Source: as `rms_norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference, per input dtype.
TOLERANCE = {"float32": (1e-5, 1e-6), "bfloat16": (8e-3, 1e-3), "float16": (1e-3, 1e-4)}


def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, torch.empty_like(y)


def _shape_class(x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool) -> str:
    rows = bucket(x.numel() // max(1, x.shape[-1]), (1, 16, 64, 256, 4096))
    return f"{dtype_name(x.dtype)} d{x.shape[-1]} rows{rows}{' gemma' if gemma else ''}"


ADD_RMS_NORM = Operation(
    package=__name__,
    name="add_rms_norm",
    schema="(Tensor x, Tensor residual, Tensor weight, float eps, bool gemma) -> (Tensor, Tensor)",
    reference=reference.add_rms_norm,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    unmeasured=("triton", "engine", "torch"),  # engines overwrite what they add, so that their bindings copy it first
)
OPERATIONS = (ADD_RMS_NORM,)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, gemma: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (y, new_residual): the normalised sum of x and residual [..., D], and the sum itself.

    Raises:
        ValueError: residual differs from x in shape or dtype, or weight is not [D].
    """
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must be {list(x.shape)} {x.dtype} like x, got {list(residual.shape)} {residual.dtype}"
        )
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], got {list(weight.shape)}")
    return ADD_RMS_NORM(x, residual, weight, eps, gemma)


__all__ = ["ADD_RMS_NORM", "OPERATIONS", "TOLERANCE", "add_rms_norm"]
