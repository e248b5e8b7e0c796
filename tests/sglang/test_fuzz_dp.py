"""Real SGLang ranks under random steps: all enter the same collectives. The fuzzer itself is tools/fuzz_dp."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 300
RELEASE = "0.5.17"

pytestmark = pytest.mark.skipif(
    metadata.version("sglang") != RELEASE, reason=f"the fuzzer builds the batches of SGLang {RELEASE}"
)


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "fuzz_dp", "--steps", str(STEPS), *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(("ranks", "layout"), [(2, "tp"), (3, "ep")], ids=["2 ranks", "3 ranks, experts dealt"])
def test_ranks_enter_the_same_collectives(ranks: int, layout: str) -> None:
    done = fuzz("--ranks", str(ranks), "--layout", layout)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.rstrip().endswith("divergences=0")
    # Two layers on every rank in every step, and many of them for ranks without requests.
    [(ran, idle)] = re.findall(r"decoder layers: (\d+), of idle ranks: (\d+)", done.stdout)
    assert int(ran) == 2 * ranks * STEPS and int(idle) > STEPS / 4
    assert "atom_patches.sglang.adapters.classes.AtomQwen3_5MoeForCausalLM" in done.stdout
