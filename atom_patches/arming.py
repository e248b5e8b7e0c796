"""Arming: have the patches ready before an engine's modules are imported.

Every way of asking for the overlay imports the package, and with it calls `arm()`: a script's own
`import atom_patches`, a plugin entry point that was named (`atom_patches_boot`), or the `.pth` line under
`ATOM_PATCHES=1`. Arming is idempotent, and costs a process that never imports an engine next to nothing: it sets
`ATOM_PATCHES=1` for child processes and puts a watch on the import system. Only when an engine's package is
looked for does `engage()` load that engine's declarations and hand them to the hooks.

Until then this module uses nothing but what every interpreter has loaded already.
"""

from __future__ import annotations

import os
import sys

ENGINES = ("vllm", "sglang")
"""Names of the engines: of their top-level package, and of the package here that declares their patches."""

MASTER = "ATOM_PATCHES"


class _EngineWatch:
    """A finder that finds nothing, but engages an engine's patches when its package is first looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        top = name.partition(".")[0]
        if top in ENGINES and top not in _engaged:
            engage(top)


_watch = _EngineWatch()
_engaged: set[str] = set()
_set_by_us: list[str] = []


def arm() -> None:
    """Watch for engines, and have child processes do the same. Does nothing under `ATOM_PATCHES=0`.

    An invalid master switch arms as well: `engage()` reports it, where the error stops an engine from starting
    and not every interpreter of the environment.

    Raises:
        SettingsError: an engine is imported already, and the environment has a value that is not allowed.
    """
    master = os.environ.get(MASTER, "")
    if master == "0":
        return
    if not master:
        os.environ[MASTER] = "1"
        _set_by_us.append(MASTER)
    if not armed():
        sys.meta_path.insert(0, _watch)  # pyright: ignore[reportArgumentType]  # a finder needs no base class
    for name in ENGINES:
        if name in sys.modules:
            engage(name)


def armed() -> bool:
    """Whether this process watches for engines."""
    return _watch in sys.meta_path


def disarm() -> None:
    """Take back an `arm()` that has not met an engine: for tools that look at the overlay without wanting it."""
    if _engaged or not armed():
        return
    sys.meta_path.remove(_watch)  # pyright: ignore[reportArgumentType]
    while _set_by_us:
        os.environ.pop(_set_by_us.pop(), None)


def engage(name: str) -> None:
    """Load the patches that are declared for engine `name` and have them wait for their targets; once a process.

    Raises:
        SettingsError: a variable of this package has a value that is not allowed.
        PatchError: an engine was built already, and `ATOM_PATCHES_STRICT=1`.
    """
    if name in _engaged:
        return
    _engaged.add(name)
    try:
        _hand_over(name)
    except BaseException:
        _engaged.discard(name)
        raise


def _hand_over(name: str) -> None:
    import importlib

    from atom_patches.core import hooks, late, settings

    settings.master()
    engine = importlib.import_module(f"atom_patches.{name}.engine").ENGINE
    too_late = late.built(engine)
    hooks.arm((engine,))
    if too_late:
        late.report(engine)
