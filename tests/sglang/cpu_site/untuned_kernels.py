"""Triton kernels take the first of their configurations on a GPU: tuning tells the fastest one, not a right one.

Tuning compiles and times dozens of each kernel in every process. Asked for by SGLANG_UNTUNED=1.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from sglang_on_cpu.after_import import replace

ASKED = "SGLANG_UNTUNED"


def _first(prune: Any) -> Any:
    @functools.wraps(prune)
    def first(tuner: Any, *args: Any, **options: Any) -> list[Any]:
        return list(prune(tuner, *args, **options))[:1]

    return first


def install() -> None:
    """Wrap Triton's autotuner when it is imported, where that was asked for."""
    if os.environ.get(ASKED) == "1":
        replace("triton.runtime.autotuner", "Autotuner.prune_configs", _first)
