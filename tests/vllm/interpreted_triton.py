"""Triton's interpreter where vLLM's second model runner wants a compiler: it asks for Triton on the CPU platform, too.

vLLM looks for a compiler in its place, and so gets a name for one.
"""

from __future__ import annotations

import os


class Interpreter:
    """What vLLM asks of a driver."""

    @staticmethod
    def is_active() -> bool:
        return True


def install() -> None:
    """Has to come before the first import of vLLM, and of a kernel."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends as known

    known.backends["cpu"] = known.Backend(compiler=None, driver=Interpreter)  # type: ignore[arg-type]
