"""FP8 with 4 exponent and 3 mantissa bits and no infinities: OCP E4M3, torch's float8_e4m3fn.

Source: P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
DTYPE = torch.float8_e4m3fn


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, saturated, to the nearest representable value, ties to even.

    `scale` is a tensor also where it is one number: on a GPU torch multiplies by the reciprocal of a Python number,
    which may round to another value.
    """
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(DTYPE)


def scale_of(x: Tensor, smallest: float) -> Tensor:
    """The scale [..., 1] that brings each row's largest magnitude, at least `smallest`, to the largest value."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp_min(smallest)
    return largest / torch.full_like(largest, LARGEST)


def power_of_two_above(scale: Tensor) -> Tensor:
    """The smallest powers of two not below positive, normal scales: those that UE8M0 can hold."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


__all__ = ["DTYPE", "LARGEST", "power_of_two_above", "quantize", "scale_of"]
