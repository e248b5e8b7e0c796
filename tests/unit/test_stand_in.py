"""A release's Python files over another release's environment: which file is whose."""

from __future__ import annotations

from pathlib import Path

import build_env
import lanes
import pytest
import stand_in

RELEASE = stand_in.StandIn("vllm-0.1", "vllm", "0.2")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def laid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is laid over the other release's packages."""
    release = {
        "vllm/__init__.py": "new",
        "vllm/layers/added.py": "new",
        "vllm-0.2.dist-info/METADATA": "Name: vllm\nVersion: 0.2\n\nVersion: 0.2 is\n",
    }
    below = {
        "vllm/__init__.py": "old",
        "vllm/gone.py": "old",
        "vllm/__pycache__/gone.cpython-311.pyc": "old",
        "vllm/_C.abi3.so": "operators",
        "vllm/layers/configs/one.json": "data",
        "torch/__init__.py": "not the release's",
    }
    sources = write(tmp_path / "sources", release)
    monkeypatch.setattr(stand_in, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(stand_in, "python_sources", lambda distribution, version: sources)
    return stand_in.layer("vllm-0.2", RELEASE, write(tmp_path / "below", below))


def test_python_is_the_release_s_and_the_rest_the_other_s(laid: Path) -> None:
    found = {str(path.relative_to(laid)): path.read_text() for path in laid.rglob("*") if path.is_file()}
    assert found.pop("vllm-0.2.dist-info/METADATA")
    assert found == {
        "vllm/__init__.py": "new",
        "vllm/layers/added.py": "new",
        "vllm/_C.abi3.so": "operators",
        "vllm/layers/configs/one.json": "data",
    }


def test_it_says_for_which_platform_its_operators_are(laid: Path) -> None:
    assert (laid / "vllm-0.2.dist-info" / "METADATA").read_text() == "Name: vllm\nVersion: 0.2+cpu\n\nVersion: 0.2 is\n"


def test_it_is_made_once(laid: Path) -> None:
    (laid / "vllm" / "__init__.py").write_text("kept")
    again = stand_in.layer("vllm-0.2", RELEASE, laid.parents[1].parent / "below")
    assert again == laid and (laid / "vllm" / "__init__.py").read_text() == "kept"


@pytest.mark.parametrize("lane", [lane for lane in lanes.LANES if lane.stood_in_for], ids=lambda lane: lane.name)
def test_what_is_declared_fits_the_lanes(lane: lanes.Lane) -> None:
    release = lane.stood_in_for
    assert release is not None and not lane.is_packaged
    assert (release.distribution, release.version) == (lane.distribution, lane.version)
    assert build_env.lock_of(release.over).exists()
