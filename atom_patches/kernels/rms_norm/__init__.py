"""Root-mean-square normalisation over the last dimension: y = x / sqrt(mean(x^2) + eps) * w.

With `gemma` the factor is 1 + w, as Gemma's and Qwen3-Next's checkpoints store it.

Schema, D values a row: x [..., D], floating, any strides; weight [D], floating; y in x's dtype and shape,
contiguous. Computed in float32 and rounded once.

Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference, per input dtype.
TOLERANCE = {"float32": (1e-5, 1e-6), "bfloat16": (8e-3, 1e-3), "float16": (1e-3, 1e-4)}


def _fake(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shape_class(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> str:
    rows = bucket(x.numel() // max(1, x.shape[-1]), (1, 16, 64, 256, 4096))
    return f"{dtype_name(x.dtype)} d{x.shape[-1]} rows{rows}{' gemma' if gemma else ''}"


RMS_NORM = Operation(
    package=__name__,
    name="rms_norm",
    schema="(Tensor x, Tensor weight, float eps, bool gemma) -> Tensor",
    reference=reference.rms_norm,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
)
OPERATIONS = (RMS_NORM,)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, gemma: bool = False) -> Tensor:
    """Normalise every row of x [..., D] by its root mean square and scale it by weight [D].

    Raises:
        ValueError: weight has another size than x's last dimension.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], got {list(weight.shape)}")
    return RMS_NORM(x, weight, eps, gemma)


__all__ = ["OPERATIONS", "RMS_NORM", "TOLERANCE", "rms_norm"]
