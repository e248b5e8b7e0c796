"""References to a function that outlive its replacement: rebind what can be rebound, report the rest."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

from atom_patches.core.site import MISSING, Change, Site, describe, unwrap

_OWN = "atom_patches.core"
# Equal constants are one object, whoever wrote them: they have no copies.
_VALUES = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)


def rebind(changes: Iterable[Change]) -> list[str]:
    """Point module-level copies (`from x import y`) of each old function to the new one.

    Returns:
        Names of the copies that were rebound, as `module.name`.
    """
    wanted = {id(one.old): one for one in changes if one.old is not one.new and not isinstance(one.old, _VALUES)}
    return [name for module in _modules() for name in _rebind_in(module, wanted)] if wanted else []


def _modules() -> list[types.ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and not name.startswith(_OWN)  # pyright: ignore[reportUnnecessaryIsInstance]
    ]


def _rebind_in(module: types.ModuleType, wanted: dict[int, Change]) -> list[str]:
    names = vars(module)
    # Nearly every module holds none of them, and there are thousands.
    if wanted.keys().isdisjoint(map(id, list(names.values()))):
        return []
    stale = [(name, wanted[id(value)]) for name, value in list(names.items()) if id(value) in wanted]
    for name, change in stale:
        names[name] = change.new
    return [f"{module.__name__}.{name}" for name, _ in stale]


def overriding(site: Site) -> list[str]:
    """Subclasses that do not inherit the patched method, because they define their own."""
    if not isinstance(site.owner, type):
        return []
    return sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in _subclasses(site.owner) if site.name in vars(cls))


def _subclasses(cls: type) -> set[type]:
    below: set[type] = set()
    todo = [cls]
    while todo:
        new = set(type.__subclasses__(todo.pop())) - below
        below |= new
        todo += new
    return below


def captured(sites: Sequence[Site]) -> dict[str, list[str]]:
    """Objects that still hold an original: tables, partial objects, bound defaults, closures of strangers.

    Returns:
        Descriptions of the holders by target. One pass over all objects of the process, whatever the number
        of sites: a few hundred milliseconds in a process that has loaded an engine.
    """
    originals = {id(unwrap(site.original)): site for site in sites if site.patches}
    if not originals:
        return {}
    # A tuple is passed on as it is, so that the call's own arguments are recognised among the holders.
    kept = tuple(unwrap(site.original) for site in originals.values())
    found: dict[str, list[str]] = {}
    for holder in gc.get_referrers(*kept):
        if holder is kept or not _strange(holder, sites):
            continue
        for item in gc.get_referents(holder):
            site = originals.get(id(item))
            if site is not None:
                found.setdefault(str(site.target), []).append(_holder(holder))
    return found


def _strange(holder: Any, sites: Sequence[Site]) -> bool:
    """Whether a holder is neither an interpreter's frame nor a part of the overlay's own chain."""
    if isinstance(holder, (types.FrameType, Change, Site)):
        return False
    for site in sites:
        if holder is vars(site) or holder is site.original:
            return False
        if any(holder is own for own in (*_chain_parts(site), *_base_namespaces(site))):
            return False
    return True


def _base_namespaces(site: Site) -> list[Any]:
    """The namespaces of the classes that an inherited original is inherited from: it stays there."""
    if site.found is not MISSING or not isinstance(site.owner, type):
        return []
    return [held for base in site.owner.__mro__ for held in gc.get_referents(base) if isinstance(held, dict)]


def _chain_parts(site: Site) -> list[Any]:
    """The replacements at a site, their attribute tables and their closures' cells."""
    parts: list[Any] = []
    function = unwrap(site.installed)
    while isinstance(function, types.FunctionType) and function is not unwrap(site.original):
        parts += [function, vars(function), *(function.__closure__ or ())]
        function = vars(function).get("__wrapped__")
    return parts


def _holder(holder: Any) -> str:
    if isinstance(holder, types.CellType):
        return "a closure"
    if isinstance(holder, (dict, list, tuple, set)):
        return f"a {type(holder).__name__} of {len(holder)} items"  # pyright: ignore[reportUnknownArgumentType]
    return describe(holder)
