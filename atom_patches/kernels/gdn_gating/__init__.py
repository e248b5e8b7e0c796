"""Decay and write strength of GatedDeltaNet from its two projections.

    g = -exp(A_log) * softplus(a + dt_bias)         beta = sigmoid(b)

Schema, T tokens, HV value heads: a, b [T, HV]; A_log, dt_bias [HV]; any floating dtype, each its own, and any strides;
g, beta [T, HV] in float32, contiguous. The weights are widened first: exp(A_log) may not fit into half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom_patches.kernels.registry import Operation, bucket, dtype_name

from . import reference

#: Largest (relative, absolute) difference from a float64 formula; the inputs' dtype does not matter.
TOLERANCE = {"float32": (1e-5, 1e-6)}


def _fake(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    return g, torch.empty_like(g)


def _shape_class(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> str:
    return f"{dtype_name(a.dtype)} h{a.shape[1]} tokens{bucket(a.shape[0], (16, 256, 4096))}"


GDN_GATING = Operation(
    package=__name__,
    name="gdn_gating",
    schema="(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias) -> (Tensor, Tensor)",
    reference=reference.gdn_gating,
    fake=_fake,
    shape_class=_shape_class,
    tolerance=TOLERANCE,
)
OPERATIONS = (GDN_GATING,)


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g, beta), both float32 [T, HV]: the logarithm of the decay, at most 0, and the write strength
    in (0, 1).

    Args:
        a, b: [T, HV] projections of the hidden states.
        A_log, dt_bias: [HV] weights.

    Raises:
        ValueError: shapes that contradict the above.
    """
    if a.dim() != 2 or a.shape != b.shape or A_log.shape != a.shape[1:] or dt_bias.shape != a.shape[1:]:
        shapes = [list(x.shape) for x in (a, b, A_log, dt_bias)]
        raise ValueError(f"a and b must be one [T, HV], A_log and dt_bias [HV], got {shapes}")
    return GDN_GATING(a, b, A_log, dt_bias)


__all__ = ["GDN_GATING", "OPERATIONS", "TOLERANCE", "gdn_gating"]
