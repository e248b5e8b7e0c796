"""Every target, and everything that a patch relies on, is the source that was reviewed, in the installed engine.

Where the installed release is one that not every patch fits, each stands where docs/compatibility.md says.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import lanes
import matrix
import pytest

from atom_patches.core import Patch, State, Target, discovery, drift, gates, reviewed
from tests import installed
from tests.installed import ENGINE

pytestmark = installed.needs_engine

PATCHES = {patch.id: patch for patch in discovery.load(ENGINE)}
VERSION = gates.engine_version(ENGINE).partition("+")[0]
LANE = next((lane for lane in lanes.LANES if (lane.engine, lane.version) == (ENGINE.name, VERSION)), None)
REVIEWED = LANE is None or LANE.reviewed


def meant_for_this(patch: Patch) -> bool:
    """Whether the release is one that every patch fits, but those that were written for others."""
    return REVIEWED and gates.reviewed_version(patch, VERSION).ok


# On a release that not every patch fits, hooks apply whatever they find; the other patches that fit are held to it.
HELD = [
    patch
    for patch in PATCHES.values()
    if meant_for_this(patch) or (patch.id in installed.fitting() and patch.kind != "bootstrap")
]
TARGETS = sorted({str(target) for patch in HELD for target in reviewed.installed(patch)})


@pytest.mark.parametrize("name", PATCHES)
def test_patch_stands_where_it_should(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "none.json"))
    finding = gates.fits(ENGINE, PATCHES[name])
    if meant_for_this(PATCHES[name]):
        assert finding.state is State.PENDING, finding
        assert "not in" not in finding.reason
    else:
        assert LANE is not None
        told = matrix.cell(LANE, PATCHES[name], matrix.recorded(LANE)).state
        expected = {State.PENDING: "applies", State.UPSTREAMED: "upstreamed"}.get(finding.state)
        assert told == expected if expected else told in ("moved", "unsupported"), (told, finding)


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
    needed = {str(target) for patch in PATCHES.values() for target in reviewed.targets(patch)}
    for file in reviewed.shipped_folder(ENGINE).glob("*.json"):
        assert set(json.loads(file.read_text())) <= needed, file


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
    """Whether a target's module can be imported here and leads to its source, which is compared all the same."""
    if text.startswith("vllm.v1.executor.ray_executor_v2:"):
        return importlib.util.find_spec("ray") is not None
    if text == "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop":
        return REVIEWED  # later releases decorate it, and the decorator does not say what it wraps
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
