"""A release's Python sources, from its wheel: fetched once, and kept in the user's cache without what is compiled."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from toolcache import cache_root, locked

OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check")


def python_sources(distribution: str, version: str) -> Path:
    """A folder to put on the path, with the release's packages in it.

    Raises:
        SystemExit: the wheel could not be fetched.
    """
    folder = cache_root() / "sources" / f"{distribution}-{version}"
    with locked(folder.with_name(folder.name + ".lock")):
        if not folder.exists():
            _fetch(f"{distribution}=={version}", folder)
    return folder


def _fetch(wanted: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", *OPTIONS, "--dest", scratch, wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{wanted} cannot be fetched:\n{done.stderr[-2000:]}")
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            # The metadata too: by it the version is known without an import.
            archive.extractall(unpacked, [n for n in archive.namelist() if n.endswith((".py", ".dist-info/METADATA"))])
        shutil.move(unpacked, folder)
