"""What is installed and what is declared, found without importing an engine."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from atom_patches import arming
from atom_patches.cli import CommandError
from atom_patches.core import discovery, gates, settings
from atom_patches.core.engine import Engine
from atom_patches.core.patch import Patch, State


@dataclass(frozen=True)
class Installed:
    """An engine in this environment.

    Args:
        engine: its descriptor.
        location: the package's folder; None if it is not installed.
        distribution: the name under which it was installed; "" for a plain source tree.
        version: as the distribution or the source tree states it; `gates.UNKNOWN` if neither does.
    """

    engine: Engine
    location: Path | None
    distribution: str
    version: str


def engines() -> list[Engine]:
    """Descriptors of the engines that patches can be declared for."""
    return [importlib.import_module(f"atom_patches.{name}.engine").ENGINE for name in arming.ENGINES]


def installed(engine: Engine) -> Installed:
    """What of `engine` this environment has."""
    location = _location(engine.package)
    for name in engine.distributions:
        try:
            return Installed(engine, location, name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Installed(engine, location, "", _version_in(location) if location else gates.UNKNOWN)


def patches(engine: Engine) -> list[Patch]:
    """The declared patches of `engine`, by id."""
    return sorted(discovery.load(engine), key=lambda patch: patch.id)


def features(of: Iterable[Patch]) -> list[str]:
    """What the environment can switch among these patches."""
    return sorted({patch.feature for patch in of if patch.kind != "bootstrap"})


def all_features() -> list[str]:
    """What the environment can switch."""
    return features(patch for engine in engines() for patch in patches(engine))


def standing(found: Installed, patch: Patch) -> gates.Finding:
    """Where a patch stands in this environment, before any engine runs."""
    if found.location is None:
        return gates.Finding(State.PENDING, f"{found.engine.name} is not installed in this environment")
    off = gates.switched_off(patch)
    if off is not None:
        return gates.Finding(State.OFF, off)
    return gates.fits(found.engine, patch)


def find(name: str) -> tuple[Engine, list[Patch]]:
    """The patch with this id, or the patches of the group with this name.

    Raises:
        CommandError: there is none; the message names the nearest id or group.
    """
    known: dict[str, tuple[Engine, list[Patch]]] = {}
    for engine in engines():
        for patch in patches(engine):
            known[patch.id] = (engine, [patch])
            if patch.group is not None:
                known.setdefault(patch.group, (engine, []))[1].append(patch)
    if name in known:
        return known[name]
    near = settings.nearest(name, known, cutoff=0.4)
    hint = f"; did you mean {near}?" if near else "."
    raise CommandError(f"there is no patch or group {name!r}{hint} `python -m atom_patches status` lists them all.")


def _location(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _version_in(location: Path) -> str:
    """The version in a source tree's generated `_version.py`."""
    try:
        text = (location / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return gates.UNKNOWN
    found = re.search(r"^(?:__version__\s*=\s*)?(?:version|__version__)\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else gates.UNKNOWN


def documentation(engine: Engine, patch: Patch) -> str:
    """The text in which the author says why, how, and until when."""
    return (_module(engine, patch).__doc__ or "").strip()


def details(engine: Engine, patch: Patch) -> list[str]:
    """The lines that a patch adds about itself, if its file has a function `details`."""
    lines: Callable[[], Iterable[str]] | None = getattr(_module(engine, patch), "details", None)
    return [] if lines is None else list(lines())


def _module(engine: Engine, patch: Patch) -> ModuleType:
    return sys.modules[engine.declarations + patch.id.removeprefix(engine.name)]
