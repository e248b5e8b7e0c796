"""Every target, and everything that a patch relies on, is the source that was reviewed, in the installed engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from atom_patches.core import State, Target, discovery, drift, gates, reviewed
from tests import installed
from tests.installed import ENGINE

pytestmark = installed.needs_engine

PATCHES = {patch.id: patch for patch in discovery.load(ENGINE)}
TARGETS = sorted({str(target) for patch in PATCHES.values() for target in reviewed.targets(patch)})


@pytest.mark.parametrize("name", PATCHES)
def test_patch_fits(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "none.json"))
    finding = gates.fits(ENGINE, PATCHES[name])
    assert finding.state is State.PENDING, finding
    assert "not in" not in finding.reason


@pytest.mark.parametrize("text", TARGETS)
def test_source_is_the_shipped_one(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "none.json"))
    target = Target.parse(text)
    lines = drift.current_lines(target)
    assert lines
    current = drift.fingerprint(lines)
    known = list(reviewed.fingerprints(ENGINE, target).values())
    assert current in known, "\n".join(drift.diff(known, lines)) or f"{text} was never recorded"


def test_nothing_is_shipped_that_no_patch_needs() -> None:
    for file in reviewed.shipped_folder(ENGINE).glob("*.json"):
        assert set(json.loads(file.read_text())) <= set(TARGETS), file


LIVE = """
import importlib, inspect, json, sys
from atom_patches import arming; arming.disarm()
from atom_patches.core import Target, source
from atom_patches.core.site import unwrap
faults = {}
for text in json.loads(sys.argv[1]):
    target = Target.parse(text)
    live = importlib.import_module(target.module)
    for part in target.qualname.split("."):
        live = inspect.getattr_static(live, part)
    live = inspect.unwrap(unwrap(live))
    try:
        file, (lines, first) = inspect.getsourcefile(live), inspect.getsourcelines(live)
    except TypeError:
        continue  # neither a function nor a class: it has no source of its own
    static = []
    for found in source.find(target):
        start = min([found.node.lineno, *(one.lineno for one in getattr(found.node, "decorator_list", []))])
        static.append((found.module.file, start, "".join(found.module.lines[start - 1 : found.node.end_lineno])))
    if (file, first, "".join(lines).rstrip()) not in [(f, n, t.rstrip()) for f, n, t in static]:
        faults[text] = [file, first, [one[:2] for one in static]]
print("RESULT " + json.dumps(faults))
"""


def importable(text: str) -> bool:
    """Whether a target's module can be imported here; its source is compared all the same."""
    if text.startswith("vllm.v1.executor.ray_executor_v2:"):
        return importlib.util.find_spec("ray") is not None
    if text.startswith("sglang.srt.compilation.backend:"):
        import torch

        return torch.cuda.is_available()
    return True


def test_live_objects_come_from_the_sources_that_were_found_without_importing() -> None:
    command = [sys.executable, "-c", LIVE, json.dumps([text for text in TARGETS if importable(text)])]
    environment = installed.environment()
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert json.loads(lines[-1].removeprefix("RESULT ")) == {}
