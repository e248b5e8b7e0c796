"""docs/compatibility.md says what the records of the releases, the declarations and the reviewed sources imply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lanes
import matrix
import pytest
import yaml

from atom_patches.core import Patch, gates, reviewed
from atom_patches.core.drift import Fingerprint

LANE = next(lane for lane in matrix.LANES if lane.name == "vllm-0.32.0")


@pytest.fixture(autouse=True)
def nothing_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "none.json"))


def test_the_document_is_up_to_date() -> None:
    assert matrix.PART.check("make matrix") == 0


def test_no_cell_is_unknown() -> None:
    unknown = [
        (name, version)
        for engine in matrix.TITLES
        for name, cells in matrix.grid(engine).items()
        for version, cell in cells.items()
        if cell.state == "unknown"
    ]
    assert not unknown, "run: make matrix"


def test_every_patch_applies_to_a_reviewed_release() -> None:
    for lane in matrix.LANES:
        if lane.reviewed:
            meant = {
                patch.id for patch in matrix.patches(lane.engine) if gates.reviewed_version(patch, lane.version).ok
            }
            grid = matrix.grid(lane.engine)
            cells = {name: grid[name][lane.version].state for name in meant}
            assert set(cells.values()) == {"applies"}, cells


def test_every_release_has_a_record_and_every_record_a_release() -> None:
    assert {lane.record for lane in matrix.LANES} == set(lanes.RECORDS.glob("*.json"))


def toy(**facts: Any) -> Patch:
    given: dict[str, Any] = {"id": "vllm.toy.patch", "target": "vllm.toy:f", "supports": "vllm>=0.20"}
    given["kind"] = "correctness"
    return Patch(**given | facts)


EITHER = {"relies_on_one_of": (("vllm.toy:g",), ("vllm.toy:h",))}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any target, the source with the hash `good` was reviewed."""

    def fingerprints(*_: Any) -> dict[str, Any]:
        return {"0.20.2": Fingerprint("good", ())}

    monkeypatch.setattr(reviewed, "fingerprints", fingerprints)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("facts", "found", "shown"),
    [
        ({}, {"vllm.toy:f": "good"}, "applies: read"),
        ({"relies_on": ("vllm.toy:g",)}, {"vllm.toy:f": "good", "vllm.toy:g": "good"}, "applies: read"),
        ({}, {"vllm.toy:f": "other"}, "unsupported: 1 of 1 changed"),
        ({"relies_on": ("vllm.toy:g",)}, {"vllm.toy:f": "good", "vllm.toy:g": None}, "unsupported: 1 of 2 changed"),
        ({"relies_on": ("vllm.toy:g",)}, {"vllm.toy:f": None, "vllm.toy:g": "good"}, "moved"),
        ({"relies_on": ("vllm.toy:g",)}, {"vllm.toy:f": "good"}, "unknown: run `make matrix`"),
        (EITHER, {"vllm.toy:f": "good", "vllm.toy:g": "good", "vllm.toy:h": None}, "applies: read"),
        (EITHER, {"vllm.toy:f": "good", "vllm.toy:g": None, "vllm.toy:h": "good"}, "applies: read"),
        (EITHER, {"vllm.toy:f": "good", "vllm.toy:g": None, "vllm.toy:h": "other"}, "unsupported: 1 of 2 changed"),
        (EITHER, {"vllm.toy:f": "good", "vllm.toy:g": None, "vllm.toy:h": None}, "unsupported: 1 of 2 changed"),
        (EITHER, {"vllm.toy:f": "good", "vllm.toy:g": "good"}, "unknown: run `make matrix`"),
        ({"kind": "bootstrap"}, {"vllm.toy:f": "other"}, "applies: read"),
        ({"kind": "bootstrap"}, {"vllm.toy:f": None}, "moved"),
    ],
)
def test_a_cell(facts: dict[str, Any], found: dict[str, str | None], shown: str) -> None:
    assert str(matrix.cell(LANE, toy(**facts), {"targets": found, "upstreamed": {}})) == shown


@pytest.mark.usefixtures("known")
def test_a_probe_outranks_the_source_and_a_run_is_said() -> None:
    targets = {"vllm.toy:f": None}
    record = {"targets": targets, "upstreamed": {"vllm.toy.patch": "the engine has it"}}
    assert str(matrix.cell(LANE, toy(), record)) == "upstreamed"
    ran = {"targets": {"vllm.toy:f": "good"}, "upstreamed": {}, "ran": ["vllm.toy.patch"]}
    assert str(matrix.cell(LANE, toy(), ran)) == "applies: ran"


@pytest.mark.parametrize(
    ("kind", "states", "what"),
    [
        ("correctness", ["applies", "applies"], "served"),
        ("correctness", ["applies", "upstreamed"], "served"),
        ("correctness", ["upstreamed", "upstreamed"], "the engine's own"),
        ("correctness", ["applies", "unsupported"], "stopped"),
        ("correctness", ["moved", "upstreamed"], "stopped"),
        ("optimisation", ["moved"], "stock, one warning"),
        ("optimisation", ["applies", "unknown"], "unknown"),
    ],
)
def test_what_a_launch_gets(kind: str, states: list[str], what: str) -> None:
    assert matrix.outcome([kind], [matrix.Cell(state) for state in states]) == what


def test_a_record_that_lacks_a_target_makes_the_run_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def short(lane: lanes.Lane) -> dict[str, Any]:
        record = json.loads(lane.record.read_text())
        record["targets"].popitem()
        return record

    monkeypatch.setattr(matrix, "recorded", short)
    last = list(matrix.summary())[-1]
    assert last.startswith(f"matrix: {len(matrix.LANES) + 2} lanes, ") and not last.endswith(", 0 unknown")


def test_sources_are_compared_with_the_newest_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newest = next(lane for lane in reversed(matrix.LANES) if lane.engine == "sglang")
    found = matrix.recorded(newest)
    monkeypatch.setattr(lanes, "read_folder", lambda engine, folder: found)
    assert matrix.against("sglang", tmp_path) == []
    target = "sglang.srt.managers.scheduler:Scheduler.__init__"
    found = {**found, "targets": found["targets"] | {target: None}}
    (line,) = matrix.against("sglang", tmp_path)
    assert line == f"- `sglang.bootstrap.scheduler`: applies on {newest.version}, moved here (`{target}`)"


def test_the_nightly_run_compares_every_engine() -> None:
    text = (Path(matrix.ROOT) / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["main-branch"]
    assert {one["engine"] for one in job["strategy"]["matrix"]["include"]} == set(matrix.TITLES)
    commands = " ".join(step.get("run", "") for step in job["steps"])
    assert "tools/matrix.py --against ${{ matrix.engine }}=${{ matrix.folder }}" in commands
    assert "gh issue create" in commands and "gh issue edit" in commands
