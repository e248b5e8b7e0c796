"""`compare` on real SGLang servers: equal with the overlay as it is, different with one whose norms are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.environment import ROOT, environment, options

BIASED = "SGLANG_PLUGINS=biased ATOM_MODELS=1 BIASED=0.02"


def compare(folder: Path, model: Path, *more: str) -> tuple[int, dict[str, Any]]:
    flags: list[str] = []
    for name, value in options(skip_server_warmup=True).items():
        if name != "skip_tokenizer_init":
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    (folder / "prompts.txt").write_text("A short one.\nAnother one, which is a little longer than the first.\n")
    command = [
        sys.executable,
        "-m",
        "atom_patches",
        "compare",
        "--prompts",
        "prompts.txt",
        "--new",
        "8",
        "--repeats",
        "1",
    ]
    command += ["--tolerance", "0.001", "--logs", "logs", "--json", *more, "--"]
    command += [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags]
    env = environment(ROOT / "tests" / "biased", SGLANG_PLUGINS="none")
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


@pytest.mark.long
def test_stock_and_overlay_answer_the_same(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    status, found = compare(tmp_path, checkpoint("qwen3"))
    assert (status, found["findings"]) == (0, [])
    assert (found["answers"]["tokens"], found["answers"]["equal"]) == (16, 16)
    assert any(one.startswith("sglang.models.") for one in found["applied"])


@pytest.mark.long
def test_wrong_norms_are_found(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    status, found = compare(tmp_path, checkpoint("qwen3"), "--overlay", BIASED)
    assert status == 1
    assert found["findings"] and all(one.startswith("DIFFERENT") for one in found["findings"])
    # Both tokens are among both servers' likeliest, of which several have the same text.
    assert found["answers"]["partings"] and all(one["apart"] is not None for one in found["answers"]["partings"])
