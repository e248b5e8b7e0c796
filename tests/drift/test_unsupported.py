"""A release that a feature does not support: a launch that asks for it is told so in one line; others go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atom_patches.core import discovery
from tests import installed

if installed.NAME == "sglang":
    from tests.drift import sglang_drill as drill
else:
    from tests.drift import vllm_drill as drill

MEMBERS = [patch for patch in discovery.load(installed.ENGINE) if patch.feature == drill.UNSUPPORTED]
pytestmark = [
    installed.needs_engine,
    pytest.mark.skipif(
        all(patch.id in installed.fitting() for patch in MEMBERS), reason="the installed release is supported"
    ),
]


def configure(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the configuration of an engine that asks for the feature; nothing is launched."""
    (folder / "config.json").write_text(json.dumps(drill.EXPERTS))
    (folder / "state").mkdir(mode=0o700)
    given = installed.environment(
        ATOM_PATCHES_STATE_DIR=str(folder / "state"), ATOM_PATCHES_ACCEPTED=str(folder / "none.json"), **environment
    )
    command = [sys.executable, "-c", drill.ASK_FOR_UNSUPPORTED, str(folder), MEMBERS[0].id]
    return subprocess.run(command, capture_output=True, text=True, env=given, timeout=300, check=False)


def test_a_launch_that_asks_stops_with_one_line(tmp_path: Path) -> None:
    done = configure(tmp_path, **drill.ENVIRONMENT)
    assert done.returncode == 1 and "CONFIGURED" not in done.stdout, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    _, head, told = done.stderr.partition(f"atom_patches stops the launch of {installed.NAME} ")
    assert head, done.stderr[-3000:]
    problems = [line for line in told.splitlines() if line.startswith("  - ")]
    assert len(problems) == 1 and len(problems[0]) < 400, problems
    assert problems[0].startswith(f"  - {drill.UNSUPPORTED} (correctness, unsupported): {installed.NAME} ")
    assert f"Install {MEMBERS[0].supports}" in problems[0] and f"explain {drill.UNSUPPORTED}" in problems[0]


def test_a_launch_with_the_feature_switched_off_goes_on(tmp_path: Path) -> None:
    variable = f"ATOM_PATCH_{drill.UNSUPPORTED.replace('.', '_').upper()}"
    done = configure(tmp_path, **drill.ENVIRONMENT, **{variable: "0"})
    assert done.returncode == 0 and "CONFIGURED" in done.stdout, done.stderr[-3000:]
    assert "is not applied" not in done.stderr
