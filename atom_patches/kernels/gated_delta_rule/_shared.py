"""What the chunked and the recurrent operators share: tolerances, shape checks, the default scale."""

from __future__ import annotations

from torch import Tensor

#: Largest (relative, absolute) difference from a float64 recurrence, per input dtype; q and k of unit length.
TOLERANCE = {"float32": (1e-4, 1e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}


def default_scale(k: Tensor) -> float:
    return float(k.shape[-1]) ** -0.5


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> int:
    """Return how many value heads one key head serves."""
    if q.dim() != 3 or q.shape != k.shape:
        raise ValueError(f"q and k must both be [T, HK, K], got {tuple(q.shape)} and {tuple(k.shape)}")
    if v.dim() != 3 or v.shape[0] != q.shape[0]:
        raise ValueError(f"v must be [T, HV, V] with T={q.shape[0]}, got {tuple(v.shape)}")
    if tuple(g.shape) != tuple(v.shape[:2]) or tuple(beta.shape) != tuple(v.shape[:2]):
        raise ValueError(f"g and beta must be {tuple(v.shape[:2])}, got {tuple(g.shape)} and {tuple(beta.shape)}")
    if v.shape[1] % q.shape[1]:
        raise ValueError(f"the value heads ({v.shape[1]}) must be a multiple of the key heads ({q.shape[1]})")
    return v.shape[1] // q.shape[1]
