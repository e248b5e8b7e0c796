"""The engine's Triton kernels take the first of their configurations: tuning tells the fastest one, not a right one.

Tuning compiles and times dozens of each kernel; ranks that share a GPU spend minutes on it.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """From now on, in this process."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def first_only(self: Any, kwargs: Any) -> list[Any]:
        return list(prune(self, kwargs))[:1]

    Autotuner.prune_configs = first_only
