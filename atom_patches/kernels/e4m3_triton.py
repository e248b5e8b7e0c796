"""The parts of `e4m3` that kernels need, exact to the last bit."""

from __future__ import annotations

import triton.language as tl

from atom_patches.kernels.assembler import jit


@jit
def encode_e4m3(x):
    """The bytes of float32 values, saturated, to the nearest, ties to even.

    By integers, so that every target and Triton's interpreter (whose conversion drops carries) agree.
    """
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 the values are multiples of 2^-9, the spacing of float32 at 2^14
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)


@jit
def power_of_two_above(scale):
    """The smallest powers of two not below positive, normal float32 scales."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


__all__ = ["encode_e4m3", "power_of_two_above"]
