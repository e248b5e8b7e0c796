"""Triton's interpreter multiplies the bits of bfloat16 operands instead of their values; this widens them first."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def widen_bfloat16_dots() -> None:
    """Replace the interpreter's product; calling it again changes nothing."""
    plain = interpreter.InterpreterBuilder.create_dot
    if plain.__name__ == "create_wide_dot":
        return

    def create_wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, *(_widened(self, operand) for operand in (a, b)), *rest)

    interpreter.InterpreterBuilder.create_dot = create_wide_dot  # pyright: ignore[reportAttributeAccessIssue]


def _widened(builder: Any, operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return builder.create_fp_ext(operand, tl.block_type(tl.float32, list(operand.data.shape)))
