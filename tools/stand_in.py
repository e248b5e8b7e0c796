"""A release that has no package for machines without a GPU: its Python files over another release's environment.

envs/NAME.toml names both. The folder that is laid over the other environment has the release's Python files, and links
to the compiled operators and data files of the other release's package. So what runs is the one release's Python on the
other's operators: one that is new in the release is not there, and one that changed is the old one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from toolcache import ROOT, cache_root, content_hash, locked
from wheel_sources import python_sources

OF_PYTHON = (".py", ".pyc")


class StandIn(NamedTuple):
    """What stands in for a release.

    Attributes:
        over: the environment below, by name.
        distribution: the release's package.
        version: the release.
    """

    over: str
    distribution: str
    version: str


def declared(name: str) -> StandIn | None:
    """What envs/NAME.toml says; None if there is no such file."""
    file = ROOT / "envs" / f"{name}.toml"
    if not file.exists():
        return None
    import tomllib  # which a Python that is then refused may lack

    return StandIn(**tomllib.loads(file.read_text(encoding="utf-8")))


def layer(name: str, release: StandIn, below: Path) -> Path:
    """The folder to put on the path before `below`, the other environment's packages; made if it is not there."""
    made_of = content_hash([Path(__file__)], *release, str(below))
    folder = cache_root() / "stand-ins" / f"{name}-{made_of}"
    with locked(folder.with_name(folder.name + ".lock")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                whole = Path(scratch) / name
                shutil.copytree(python_sources(release.distribution, release.version), whole)
                for package in [path for path in whole.iterdir() if not path.name.endswith(".dist-info")]:
                    _link_the_rest(below / package.name, package)
                _say_cpu(whole, release)
                whole.rename(folder)
    return folder


def _link_the_rest(package: Path, into: Path) -> None:
    """Link what the package has besides Python files, where there is nothing yet."""
    for parent, _, names in os.walk(package):
        for name in names:
            link = into / Path(parent).relative_to(package) / name
            if not name.endswith(OF_PYTHON) and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(parent) / name)


def _say_cpu(folder: Path, release: StandIn) -> None:
    """State a version whose local part is `cpu`: by that, vLLM knows for which platform it was compiled."""
    (metadata,) = folder.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    line = f"\nVersion: {release.version}\n"
    assert text.count(line) == 1, f"{metadata} states its version otherwise"
    metadata.write_text(text.replace(line, f"\nVersion: {release.version}+cpu\n"), encoding="utf-8")
