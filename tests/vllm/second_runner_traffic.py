"""tests/vllm/traffic.py on vLLM's second model runner, which asks for Triton on the CPU platform, too.

Triton's interpreter runs its kernels here. vLLM looks for a compiler in its place, and so gets a name for one.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends as known  # noqa: E402


class Interpreter:
    """What vLLM asks of a driver."""

    @staticmethod
    def is_active() -> bool:
        return True


known.backends["cpu"] = known.Backend(compiler=None, driver=Interpreter)  # type: ignore[arg-type]

if __name__ == "__main__":
    from tests.vllm.traffic import main

    main()
