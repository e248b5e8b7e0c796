"""The drill for every patch that fits the installed release: its function changes, and what has to follow follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom_patches.core import gates
from tests import installed
from tests.drift.changed import EDIT, engine_with_changed

pytestmark = installed.needs_engine

VERSION = gates.engine_version(installed.ENGINE).partition("+")[0]
# A patch that was written for other releases may fit by its source. What is said of it then is another thing.
PATCHES = {
    name: patch
    for name, patch in installed.fitting().items()
    if patch.kind != "bootstrap" and gates.reviewed_version(patch, VERSION).ok
}
SCRIPT = Path(__file__).with_name("every_patch.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each patch said where every patched function has one line more."""
    root = engine_with_changed([patch.site for patch in PATCHES.values()], tmp_path_factory.mktemp("changed"))
    return judged(root, tmp_path_factory.mktemp("state"))


def judged(path: Path | None, scratch: Path) -> dict[str, Any]:
    environment = installed.environment(ATOM_PATCHES_ACCEPTED=str(scratch / "none.json"))
    environment["ATOM_PATCHES_STATE_DIR"] = str(scratch)
    scratch.chmod(0o700)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, str(SCRIPT), installed.NAME, *PATCHES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    result = json.loads(lines[-1].removeprefix("RESULT "))
    assert result["imported"] is False, "a patch is judged before its engine is imported"
    return result["patches"]


@pytest.mark.parametrize("name", [name for name, patch in PATCHES.items() if patch.kind == "correctness"])
def test_a_launch_that_needs_it_stops(name: str, outcomes: dict[str, Any]) -> None:
    found = outcomes[name]
    assert len(found["errors"]) == 2 and not found["warnings"], found
    for error in found["errors"]:
        assert error.startswith(f"atom_patches stops the launch of {installed.NAME} "), error
        assert f"{name} (correctness, drifted): {PATCHES[name].target} changed (" in error, error
        assert EDIT in error and f"accept {name}" in error, error
    assert found["state"] == "drifted"


@pytest.mark.parametrize("name", [name for name, patch in PATCHES.items() if patch.kind == "optimisation"])
def test_the_engine_runs_as_it_does_without_it_after_one_warning(name: str, outcomes: dict[str, Any]) -> None:
    found = outcomes[name]
    assert not found["errors"] and len(found["warnings"]) == 1, found
    assert f"{name} is not applied" in found["warnings"][0] and EDIT in found["warnings"][0], found
    assert found["state"] == "drifted"


def test_nothing_is_said_where_nothing_changed(tmp_path: Path) -> None:
    for name, found in judged(None, tmp_path).items():
        assert not found["errors"] and not found["warnings"], (name, found)
        assert found["state"] == "pending", (name, found)
