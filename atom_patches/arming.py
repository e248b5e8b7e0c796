"""Arming: have the patches ready before an engine's modules are imported.

Every way of asking for the overlay ends in `arm()`: `import atom_patches`, a plugin entry point that was named,
or the `.pth` line with `ATOM_PATCHES=1`. It is idempotent, and costs a process that never imports an engine next
to nothing: it exports `ATOM_PATCHES=1` to child processes and puts a watch on the import system. When an engine's
package is about to be imported, `engage()` loads that engine's declarations and hands them to the hooks.

This module imports only what every interpreter has loaded already.
"""

from __future__ import annotations

import os
import sys

ENGINES = ("vllm", "sglang")
MASTER = "ATOM_PATCHES"


class _EngineWatch:
    """A finder that finds nothing: it engages the patches when an engine's package is first looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ENGINES:
            engage(name)


_watch = _EngineWatch()
_engaged: set[str] = set()


def arm() -> None:
    """Watch for an engine, and let child processes do the same. Does nothing under `ATOM_PATCHES=0`.

    An invalid value of the master switch is kept, and reported by `engage()`: an interpreter that never
    imports an engine should not fail because of it.
    """
    if os.environ.get(MASTER, "") == "0":
        return
    if os.environ.get(MASTER, "") == "":
        os.environ[MASTER] = "1"
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)  # type: ignore[arg-type]  # a finder needs no base class
    for name in ENGINES:
        if name in sys.modules:
            engage(name)


def disarm() -> None:
    """Take back an `arm()` that has not met an engine yet. For tools that must not arm their own process."""
    if _engaged:
        return
    if _watch in sys.meta_path:
        sys.meta_path.remove(_watch)  # type: ignore[arg-type]
        os.environ.pop(MASTER, None)


def armed() -> bool:
    """Whether this process watches for engines."""
    return _watch in sys.meta_path


def engage(name: str) -> None:
    """Load the declarations of engine `name` and register their hooks; once per process."""
    if name in _engaged:
        return
    _engaged.add(name)
    import importlib

    hooks = importlib.import_module("atom_patches.core.hooks")
    engine = importlib.import_module(f"atom_patches.{name}.engine")
    hooks.arm((engine.ENGINE,))
