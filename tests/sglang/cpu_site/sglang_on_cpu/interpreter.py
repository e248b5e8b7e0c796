"""What Triton's interpreter needs in order to run SGLang's kernels."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from sglang_on_cpu.after_import import replace

FLA = "sglang.kernels.ops.attention.fla"


def _one_configuration(init: Any) -> Any:
    """To choose among several, the autotuner would time them, which takes a driver."""

    @functools.wraps(init)
    def initialise(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.configs = self.configs[:1]

    return initialise


def _late(name: str) -> Any:
    """The interpreter puts its own functions into triton.language when a kernel runs: look them up then."""

    def called(x: Any) -> Any:
        import triton.language as tl

        return getattr(tl, name)(x)

    return lambda original: called


def install() -> None:
    replace("triton.runtime.autotuner", "Autotuner.__init__", _one_configuration)
    for name in ("exp", "exp2", "log", "log2"):
        replace(f"{FLA}.op", name, _late(name))
    replace(f"{FLA}.utils", "custom_device_ctx", lambda original: lambda index: contextlib.nullcontext())
    replace(f"{FLA}.layernorm_gated", "_get_sm_count", lambda original: lambda device: 8)
