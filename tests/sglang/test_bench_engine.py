"""`bench engine` on real SGLang schedulers: equal with the overlay as it is; what makes its figures worthless fails."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from atom_patches.bench.engines import SGLANG
from tests.sglang.environment import HERE

pytestmark = pytest.mark.skipif(
    version("sglang") not in SGLANG.releases, reason="a side drives the scheduler of one release"
)
ON_CPU = ("--device", "cpu", "--rounds", "2", "--limit", "200")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=500)


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "bench-engine" / "engine.json").read_text())


@pytest.mark.long
def test_whole_engines_are_measured_in_turn(tmp_path: Path) -> None:
    ran = run(tmp_path, "-m", "atom_patches", "bench", "engine", "--engine", "sglang", *ON_CPU, "--html", "report.html")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("nothing wrong\n")
    found = read(tmp_path)
    assert [model["model"] for model in found["models"]] == ["tiny", "tiny-dense"]
    for model, name in zip(found["models"], ("Qwen3Next", "Qwen3"), strict=True):
        assert model["answers"]["share"] == 1.0 and model["answers"]["logprob_worst"] < 1e-4
        sides = model["sides"]
        assert sides["stock"]["model"].startswith("sglang.srt.models.qwen3")
        assert sides["overlay"]["model"] == f"atom_patches.sglang.adapters.classes.Atom{name}ForCausalLM"
        assert sides["overlay"]["fusions"] == (["experts"] if name == "Qwen3Next" else [])
        assert sides["stock"]["fusions"] == [] and sides["stock"]["graphs"].endswith("prompts in chunks of 64")
        for cell in model["cells"]:
            assert {side: len(times) for side, times in cell["rounds"].items()} == {"stock": 2, "overlay": 2}
    assert "nothing about a GPU" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("stock", "NOT APPLIED  tiny-dense: the overlay's side ran sglang.srt.models.qwen3.Qwen3ForCausalLM"),
        ("norms", "DIFFERENT  tiny-dense: prompt 1: "),
    ],
)
def test_an_overlay_that_is_not_what_it_should_be_fails(wrong: str, told: str, tmp_path: Path) -> None:
    ran = run(tmp_path, str(HERE / "wrong_bench.py"), wrong, *ON_CPU, "--models", "tiny-dense", "--batches", "1")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert any(one.startswith(told) for one in read(tmp_path)["findings"]), ran.stdout
