"""The drift drill on the real engine: one line of an upstream function changes, and everything says so.

The changed engine is a folder of links to the installed one, with one file replaced, put in front of it on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import installed
from tests.drift.changed import EDIT, engine_with_changed

if installed.NAME == "sglang":
    from tests.drift import sglang_drill as drill
else:
    from tests.drift import vllm_drill as drill

PATCH = drill.PATCH
pytestmark = [
    installed.needs_engine,
    pytest.mark.skipif(PATCH.id not in installed.fitting(), reason=f"{PATCH.id} does not fit the installed release"),
]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on the path: the engine with one line more in the function that `PATCH` replaces."""
    return engine_with_changed([PATCH.site], tmp_path_factory.mktemp("changed"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights: enough to build an engine's configuration from."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(drill.MODEL))
    return folder


class Launcher:
    """Runs commands with the changed engine in front, and a file of accepted fingerprints of their own."""

    def __init__(self, changed: Path, folder: Path) -> None:
        state = folder / "state"
        state.mkdir(mode=0o700)
        environment = installed.environment()
        path = [str(changed), *filter(None, [environment.get("PYTHONPATH", "")])]
        self.environment = environment | {
            "PYTHONPATH": os.pathsep.join(path),
            "ATOM_PATCHES_ACCEPTED": str(folder / "accepted.json"),
            "ATOM_PATCHES_STATE_DIR": str(state),
            **drill.ENVIRONMENT,
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        given = self.environment | environment
        return subprocess.run(command, capture_output=True, text=True, env=given, timeout=300, check=False)


@pytest.fixture
def launcher(changed: Path, tmp_path: Path) -> Launcher:
    return Launcher(changed, tmp_path)


def test_correctness_patch_stops_the_launch_until_the_change_is_accepted(launcher: Launcher, model: Path) -> None:
    stopped = launcher.run("-c", drill.CONFIGURE, str(model), PATCH.id)
    assert stopped.returncode == 1
    assert f"{PATCH.id} (correctness, drifted): {PATCH.target} changed (" in stopped.stderr
    assert EDIT in stopped.stderr and f"accept {PATCH.id}" in stopped.stderr
    assert "Traceback" not in stopped.stderr and "STATE" not in stopped.stdout

    explained = launcher.run("-m", "atom_patches", "explain", PATCH.id)
    assert f"+ {EDIT}" in explained.stdout, explained.stdout + explained.stderr

    drifted = [line.split()[1] for line in stopped.stderr.splitlines() if line.startswith("  - ")]
    assert PATCH.id in drifted
    for name in drifted:
        accepted = launcher.run("-m", "atom_patches", "accept", name)
        assert accepted.returncode == 0, accepted.stdout + accepted.stderr

    launched = launcher.run("-c", drill.CONFIGURE, str(model), PATCH.id)
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert "STATE applied" in launched.stdout or "STATE pending" in launched.stdout


def test_server_stops_in_the_parent_with_one_message(launcher: Launcher, model: Path) -> None:
    plugins = {f"{installed.NAME.upper()}_PLUGINS": "atom"}
    stopped = launcher.run(*[part.format(model=model) for part in drill.SERVER], **plugins)
    assert stopped.returncode == 1
    text = stopped.stdout + stopped.stderr
    assert text.count(f"atom_patches stops the launch of {installed.NAME}") == 1
    assert EDIT in text
    started = [one for one in ("EngineCore", "Scheduler hit") if one in text.replace(PATCH.target, "")]
    assert "Traceback" not in text and not started, text[-3000:]


@pytest.mark.skipif(PATCH.target not in drill.OPTIMISATION, reason="the changed function is another one here")
def test_optimisation_is_stock_with_one_warning(launcher: Launcher) -> None:
    result = launcher.run("-c", drill.OPTIMISATION)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "STATE drifted True" in result.stdout
    assert result.stderr.count("test.faster is not applied") == 1
    strict = launcher.run("-c", drill.OPTIMISATION, ATOM_PATCHES_STRICT="1")
    assert strict.returncode == 1 and "ATOM_PATCHES_STRICT=1" in strict.stderr and "Traceback" not in strict.stderr
