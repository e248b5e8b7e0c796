"""Scale the last dimension to unit length: y = x / sqrt(sum(x^2) + eps).

eps is added to the sum of squares, under the root, as both transformers and the Triton kernels of the
engines do; a row of zeros therefore stays zeros. Schema: x [..., D], floating, any strides; y in x's dtype;
computed in float32.
"""

from __future__ import annotations

from .reference import l2norm

#: Largest (relative, absolute) difference from a float64 formula, per input dtype.
TOLERANCE = {"float32": (1e-5, 1e-7), "bfloat16": (8e-3, 1e-3), "float16": (1e-3, 1e-4)}

__all__ = ["TOLERANCE", "l2norm"]
