"""The environment in which a rank's process starts: that of the tests' engines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def variables(decoders: str) -> dict[str, str]:
    """For the overlay's decoders or SGLang's own; on a machine without a GPU also what stands in for one."""
    spec = importlib.util.spec_from_file_location("sglang_environment", ROOT / "tests" / "sglang" / "environment.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("tests/sglang/environment.py: run the fuzzer from a checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    armed = "1" if decoders == "atom" else "0"
    return module.environment(ROOT / "tools", ATOM_PATCHES=armed, ATOM_MODELS=armed)
