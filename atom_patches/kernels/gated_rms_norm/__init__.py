"""GatedDeltaNet's output norm: normalise each head, scale it, then multiply by the activated gate.

    y = x / sqrt(mean(x^2) + eps) * w * act(gate)          act: silu (gate * sigmoid(gate)) or sigmoid

The norm comes before the gate: the gate does not enter the mean.

Schema, T tokens, H heads of D: x, gate [T, H, D], floating, any strides and each its own dtype, so that the gate may
be a part of a projection's output; weight [D], floating; y [T, H, D] in x's dtype, contiguous. `activation` is "silu"
or "sigmoid". Computed in float32 and rounded once.

Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024 (arXiv:2412.06464), the output gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from the reference, per dtype of x.
TOLERANCE = {"float32": (1e-5, 1e-6), "bfloat16": (8e-3, 1e-3), "float16": (1e-3, 1e-4)}

ACTIVATIONS = ("silu", "sigmoid")


def _fake(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shape_class(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> str:
    return f"{dtype_name(x.dtype)} h{x.shape[1]} d{x.shape[2]} tokens{bucket(x.shape[0], (1, 16, 64, 256, 4096))}"


GATED_RMS_NORM = Operation(
    package=__name__,
    name="gated_rms_norm",
    schema="(Tensor x, Tensor gate, Tensor weight, float eps, str activation) -> Tensor",
    reference=reference.gated_rms_norm,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
    unmeasured=("triton", "engine", "torch"),  # bindings of engines copy rows that are not in line
)
OPERATIONS = (GATED_RMS_NORM,)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, *, activation: str = "silu") -> Tensor:
    """Normalise the heads of x [T, H, D], scale them by weight [D] and multiply by the activated gate [T, H, D].

    Raises:
        ValueError: a shape or the activation is none of the schema's.
    """
    if x.dim() != 3 or gate.shape != x.shape:
        raise ValueError(f"x and gate must be one [T, H, D], got {list(x.shape)} and {list(gate.shape)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], got {list(weight.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return GATED_RMS_NORM(x, gate, weight, eps, activation)


__all__ = ["ACTIVATIONS", "GATED_RMS_NORM", "OPERATIONS", "TOLERANCE", "gated_rms_norm"]
