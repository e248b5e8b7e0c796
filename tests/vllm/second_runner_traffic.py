"""tests/vllm/traffic.py on vLLM's second model runner, on the CPU platform."""

from __future__ import annotations

from tests.vllm import interpreted_triton

interpreted_triton.install()

if __name__ == "__main__":
    from tests.vllm.traffic import main

    main()
