"""Every Triton kernel compiles for the GPUs that are served, at the benchmark's shapes, and fits their shared memory.

No GPU is needed: the providers run on meta tensors, which also proves that no host function reads a tensor's data.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atom_patches.core import settings

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FAMILIES = [
    family
    for family in settings.kernel_families()
    if (ROOT / "atom_patches" / "kernels" / family / "triton_impl.py").is_file()
]

MOST_SPILLED = {"mla_attention": {"narrow": 0, "wide": 64}}
"""Bytes a thread, for sm_90, of kernels that share out their registers by hand. Measured were 0 and 32."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_of(family: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "compile_kernels.py", "--reports", family],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    count = int(done.stdout.split("compile: ")[-1].split()[0])
    assert count > 0, f"{family} has Triton kernels, but no benchmark case runs them: {done.stderr}"
    for kernel, most in MOST_SPILLED.get(family, {}).items():
        spilled = [int(size) for size in re.findall(rf"^cuda:90 +{kernel} .* spills +(\d+) ", done.stdout, re.M)]
        assert spilled and max(spilled) <= most, f"{kernel} spills {spilled} bytes a thread"
