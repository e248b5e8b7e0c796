"""`gluon_jit`: Gluon's own, except that kernels for Hopper are assembled by the newest ptxas at hand (assembler.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction

from atom_patches.kernels.assembler import Kernel


class GluonKernel(Kernel, GluonJITFunction[Any]):
    """A Gluon function that the newest assembler at hand assembles."""


def gluon_jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Iterable[str] = ()) -> Any:
    """Declare a Gluon kernel, or a function that kernels call.

    Args:
        do_not_specialize: integer arguments whose value changes from call to call, so that no value of theirs is
            compiled in.
    """
    if function is None:
        return lambda function: gluon_jit(function, do_not_specialize=do_not_specialize)
    return GluonKernel(function, do_not_specialize=list(do_not_specialize))


__all__ = ["GluonKernel", "gluon_jit"]
