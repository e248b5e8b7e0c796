"""Post-import triggers: run something once a module is completely imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar

from wrapt import register_post_import_hook

from atom_patches.core.engine import Engine

Callback = Callable[[ModuleType], None]

# Modules whose triggers are running: all their code has run, though the import system still counts them as under way.
_executed: list[ModuleType] = []


def arm(engines: Iterable[Engine]) -> None:
    """Have the patches of `engines` wait for their targets. Arming an engine again changes nothing."""
    from atom_patches.core.registry import REGISTRY

    for engine in engines:
        REGISTRY.arm(engine)


def imported(name: str) -> ModuleType | None:
    """The module, if it is imported completely."""
    module = sys.modules.get(name)
    if module is None:
        return None
    executed = any(one is module for one in _executed)
    return module if executed or not _importing(module) else None


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` once module `name` is complete: now, if it is already.

    What the callback raises, the import statement raises.
    """

    def complete(module: ModuleType) -> None:
        _executed.append(module)
        try:
            callback(module)
        finally:
            _executed.remove(module)

    module = sys.modules.get(name)
    if module is not None and _importing(module):
        _when_complete(module, complete)
    else:
        register_post_import_hook(complete, name)


def _importing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _when_complete(module: ModuleType, callback: Callback) -> None:
    """Call back at the end of an import that is already under way.

    No finder sees that end. The import system marks it by clearing a flag on the module's spec, under the
    module's import lock and whether the import succeeded or not: so the spec reports that one assignment, and
    is an ordinary spec again afterwards.
    """
    spec = module.__spec__
    if spec is None:
        return
    waiting = getattr(type(spec), "waiting", None)
    if waiting is None:
        waiting = _watch(spec, module)
    waiting.append(callback)


def _watch(spec: ModuleSpec, module: ModuleType) -> list[Callback]:
    ordinary = type(spec)

    class Watched(ordinary):
        waiting: ClassVar[list[Callback]] = []

        def __setattr__(self, attribute: str, value: object) -> None:
            super().__setattr__(attribute, value)
            if attribute != "_initializing" or value:
                return
            super().__setattr__("__class__", ordinary)
            if sys.modules.get(self.name) is module:
                for callback in Watched.waiting:
                    callback(module)

    spec.__class__ = Watched
    return Watched.waiting
