"""E4M3 written down from its definition: one sign bit, four of exponent (bias 7), three of mantissa, one NaN."""

from __future__ import annotations

import struct
from collections.abc import Iterable


def value(code: int) -> float:
    """What a byte without its sign bit stands for."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


VALUES = [value(code) for code in range(0x7F)]


def encode(x: float) -> int:
    """The byte nearest to x, the even one of two; beyond the largest, the largest."""
    size = min(abs(x), VALUES[-1])
    code = min(range(0x7F), key=lambda c: (abs(VALUES[c] - size), c & 1))
    return code | (0x80 if struct.pack(">f", x)[0] & 0x80 else 0)


def encode_all(xs: Iterable[float], scale: float) -> bytes:
    """Every x / scale; both are float32 numbers, and so is the quotient."""
    return bytes(encode(single(x / scale)) for x in xs)


def single(x: float) -> float:
    """x rounded to float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]
