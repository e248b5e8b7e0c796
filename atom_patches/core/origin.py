"""Does the loaded object at a site come from the source that defines its target?"""

from __future__ import annotations

import os
import types

from atom_patches.core import source
from atom_patches.core.site import Site, describe, unwrap
from atom_patches.core.source import Found, SourceError


def examine(site: Site) -> str:
    """Find out whether the site is where its object is defined (`Site.shared`), and who replaced it, if anyone did.

    Returns:
        A note about a foreign replacement under the patch, or "".
    """
    try:
        found = source.find(site.target)
    except SourceError:
        return ""
    site.shared = any(one.module.name == site.target.module for one in found)
    function = unwrap(site.original)
    if not isinstance(function, types.FunctionType) or not _foreign(function, found):
        return ""
    return f"it wraps {describe(function)}, which someone put in the place of the engine's own"


def _foreign(function: types.FunctionType, found: list[Found]) -> bool:
    """Whether the function has more layers than its definition's decorators explain."""
    decorators = max(len(getattr(one.node, "decorator_list", ())) for one in found)
    layers = 0
    innermost = function
    while isinstance(inner := getattr(innermost, "__wrapped__", None), types.FunctionType):
        innermost = inner
        layers += 1
    if not any(_defined_by(innermost, one) for one in found):
        return decorators == 0  # a decorator may hide the function that it was given
    return layers > decorators


def _defined_by(function: types.FunctionType, found: Found) -> bool:
    code, node = function.__code__, found.node
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    same_file = os.path.realpath(code.co_filename) == os.path.realpath(found.module.file)
    return same_file and first <= code.co_firstlineno <= (node.end_lineno or node.lineno)
