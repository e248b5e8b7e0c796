"""Triton's interpreter cuts bfloat16 off instead of rounding, and loses the carry where FP8 rounds up to a power of
two; this lets torch convert, as a GPU would."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

CONVERTED = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}


def round_casts() -> None:
    """Replace the interpreter's conversions from and to these types; calling it again changes nothing."""
    plain = interpreter._convert_float
    if plain.__name__ == "convert_exactly":
        return

    def convert_exactly(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in CONVERTED and target not in CONVERTED:
            return plain(data, source, target, rounding)
        return _numpy(_torch(data, source).to(_torch_dtype(target)))

    interpreter._convert_float = convert_exactly


def _torch(data: Any, dtype: Any) -> torch.Tensor:
    values = torch.from_numpy(np.ascontiguousarray(data).reshape(data.shape))
    return values.view(CONVERTED[dtype]) if dtype in CONVERTED else values


def _numpy(values: torch.Tensor) -> Any:
    """The bits, as unsigned integers."""
    return values.view(
        {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[values.element_size()]
    ).numpy()


def _torch_dtype(dtype: Any) -> torch.dtype:
    return (
        CONVERTED.get(dtype) or {tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64}[dtype]
    )
