"""`compare` and `bench engine` on real vLLM engines; a decoder whose norms are wrong is different."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.gdn_oracle import environment

BIASED = Path(__file__).parents[1] / "biased"
SIDES = ("stock", "overlay", "without qk_rope")
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4")


def run(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(BIASED), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0", VLLM_PLUGINS="", PYTHONPATH=path, **more
    )
    command = [sys.executable, "-m", "atom_patches", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)


def compare(folder: Path, model: Path, *more: str) -> tuple[int, dict[str, Any]]:
    (folder / "prompts.txt").write_text("A short one.\nAnother one, which is a little longer than the first.\n")
    options = ["--prompts", "prompts.txt", "--new", "8", "--repeats", "1", "--tolerance", "0.001", "--logs", "logs"]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *OPTIONS]
    ran = run(folder, "compare", *options, "--report", "report.html", "--json", *more, "--", *server)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


@pytest.mark.long
def test_stock_and_overlay_answer_the_same(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    status, found = compare(tmp_path, checkpoint("qwen3_tied"))
    assert (status, found["findings"]) == (0, [])
    assert (found["answers"]["tokens"], found["answers"]["equal"]) == (16, 16)
    assert found["applied"] == ["vllm.models.initialize_model"]
    assert "equal, but for what rounding explains" in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_wrong_norms_are_found(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    broken = "VLLM_PLUGINS=biased ATOM_MODELS=1 BIASED=0.1"
    status, found = compare(tmp_path, checkpoint("qwen3_tied"), "--overlay", broken)
    assert status == 1
    assert found["findings"] and all(one.startswith("DIFFERENT") for one in found["findings"])


@pytest.mark.long
def test_whole_engines_are_measured_in_turn(tmp_path: Path) -> None:
    ran = run(tmp_path, "bench", "engine", "--device", "cpu", "--rounds", "2", "--fusions", "--html", "report.html")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("nothing wrong\n")
    found = json.loads((tmp_path / "bench-engine" / "engine.json").read_text())
    assert [model["model"] for model in found["models"]] == ["tiny", "tiny-dense"]
    for model in found["models"]:
        assert model["answers"]["share"] == 1.0 and model["answers"]["logprob_worst"] < 1e-4
        assert model["sides"]["stock"]["model"].startswith("vllm.")
        assert model["sides"]["overlay"]["model"].startswith("atom_patches.")
        # As the engines' layers say. Experts, caches and products are vLLM's own on its CPU platform.
        assert model["fusions"]["built"] == {"overlay": ["qk_rope"], "without qk_rope": []}
        assert model["fusions"]["unused"] == ["experts", "kv_cache", "linear"]
        for cell in model["cells"]:
            assert {side: len(times) for side, times in cell["rounds"].items()} == dict.fromkeys(SIDES, 2)
            assert cell["fusions"]["qk_rope"]["ratio"]["median"] > 0
    assert "nothing about a GPU" in (tmp_path / "report.html").read_text()
