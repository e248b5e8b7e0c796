"""Decay and write strength of GatedDeltaNet from its two projections.

    g = -exp(A_log) * softplus(a + dt_bias)         beta = sigmoid(b)

Schema, T tokens, HV value heads: a, b [T, HV]; A_log, dt_bias [HV]; g, beta [T, HV] in float32. Any
floating input dtype and strides.
"""

from __future__ import annotations

from .reference import gdn_gating

#: Largest (relative, absolute) difference from a float64 formula; the inputs' dtype does not matter.
TOLERANCE = {"float32": (1e-5, 1e-6)}

__all__ = ["TOLERANCE", "gdn_gating"]
