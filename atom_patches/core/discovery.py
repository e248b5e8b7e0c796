"""Find the declarations of an engine: every `FEATURE/PATCH.py` below its package is one patch."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from atom_patches.core.engine import Engine
from atom_patches.core.patch import Patch

NOT_FEATURES = ("adapters", "fingerprints", "kernels")


def package_folder(name: str) -> Path:
    """The folder of package `name`, which is not imported unless it has a parent package.

    Raises:
        ModuleNotFoundError: there is no such package.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package named {name!r}", name=name)
    return Path(next(iter(spec.submodule_search_locations)))


def declaration_modules(engine: Engine) -> Iterator[str]:
    """Names of the modules that declare a patch of `engine`, in a stable order."""
    root = package_folder(engine.declarations)
    for file in sorted(root.glob("*/*.py")):
        feature = file.parent.name
        if feature not in NOT_FEATURES and not file.name.startswith("_"):
            yield f"{engine.declarations}.{feature}.{file.stem}"


def load(engine: Engine) -> list[Patch]:
    """Import the declarations of `engine` and return its patches.

    Raises:
        TypeError: a declaring module has no `PATCH`, or one that was given no replacement.
        ValueError: a patch's id is not its module's name.
    """
    return [_declared(name, engine) for name in declaration_modules(engine)]


def _declared(name: str, engine: Engine) -> Patch:
    patch = getattr(importlib.import_module(name), "PATCH", None)
    if not isinstance(patch, Patch):
        raise TypeError(f"{name} declares no patch: a module in a feature folder has a top-level PATCH = Patch(...)")
    if patch.builder is None:
        raise TypeError(f"{name}: PATCH has no replacement; decorate its builder with @PATCH.around")
    expected = engine.name + name.removeprefix(engine.declarations)
    if patch.id != expected:
        raise ValueError(f"{name}: PATCH.id is {patch.id!r}, but a file's place says {expected!r}")
    return patch


@functools.cache
def code_version() -> str:
    """Digest of this package's own source. Compile-cache keys carry it: a patch's effect may lie in any file."""
    root = package_folder("atom_patches")
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
