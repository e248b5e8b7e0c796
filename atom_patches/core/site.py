"""One place in an engine that patches take over, and the chain of patches that stand there.

The site remembers the object that it found. With no patch left it puts exactly that object back.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, cast

from atom_patches.core.patch import Patch, PatchError, Target

MISSING: Any = object()
# Marks of torch's compiler describe the function that carries them, not one that takes its place.
_NOT_COPIED = ("_torchdynamo", "__wrapped__")


class Change(NamedTuple):
    """A function that stood at a site, and the one that stands there now."""

    old: Any
    new: Any


NO_CHANGE = Change(None, None)


class Site:
    """The attribute that a target names, in its loaded module.

    `shared`: other modules' copies of the original stand for the same thing, and are patched with it. Not so when
    the target is itself such a copy (`from x import y`): then it alone is meant.
    """

    def __init__(self, target: Target, module: ModuleType) -> None:
        self.target = target
        self.owner, self.name = _owner(target, module)
        self.found: Any = _own(self.owner, self.name)
        self.original: Any = _inherited(self.owner, self.name) if self.found is MISSING else self.found
        if self.original is MISSING:
            raise PatchError(f"{target} does not exist in the installed engine: {self.owner!r} has no {self.name!r}")
        self.installed: Any = self.found
        self.patches: list[Patch] = []
        self.shared = True

    def live(self) -> Any:
        """The object that stands at the site now, before any descriptor looks at it."""
        return _own(self.owner, self.name)

    @property
    def displaced(self) -> bool:
        """Whether someone else has replaced what the site installed."""
        return self.live() is not self.installed

    @property
    def covered(self) -> bool:
        """Whether what someone else put here says that it wraps what the site installed."""
        ours, function = unwrap(self.installed), unwrap(self.live())
        while function is not None and function is not ours:
            function = getattr(function, "__wrapped__", None)
        return function is ours

    def add(self, patch: Patch) -> Change:
        """Let `patch` stand at the site too, at its place in the chain.

        Raises:
            PatchError: its builder failed, it returned something unfit, or the site is displaced.
        """
        if self.displaced:
            raise PatchError(f"{self.target} was replaced by {describe(self.live())} after it had been patched")
        patches = sorted([*self.patches, patch], key=lambda one: one.sort_key)
        return self._rebuild(patches)

    def remove(self, patch: Patch) -> Change:
        """Take `patch` out of the chain. Someone else's later replacement is left alone."""
        patches = [one for one in self.patches if one is not patch]
        if self.displaced:
            self.patches = patches
            return NO_CHANGE
        return self._rebuild(patches)

    def _rebuild(self, patches: list[Patch]) -> Change:
        before = unwrap(self.installed if self.patches else self.original)
        function = unwrap(self.original)
        for patch in patches:
            function = self._replacement(patch, function)
        self._install(rewrap(self.original, function) if patches else self.found)
        copied = self.shared or bool(self.patches)
        self.patches = patches
        return Change(before, function) if copied else NO_CHANGE

    def _install(self, value: Any) -> None:
        if value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)
        self.installed = value

    def _replacement(self, patch: Patch, original: Any) -> Any:
        build: Callable[[Any], Any] | None = patch.builder
        if build is None:
            raise PatchError(f"{patch.id} declares no replacement")
        try:
            replacement = build(original)
        except Exception as error:
            raise PatchError(f"building the replacement failed: {type(error).__name__}: {error}") from error
        if isinstance(original, types.FunctionType):
            if not isinstance(replacement, types.FunctionType) or replacement is original:
                raise PatchError(f"the replacement of a function is a new plain function, got {replacement!r}")
            self._dress(replacement, original)
        return replacement

    def _dress(self, replacement: types.FunctionType, original: types.FunctionType) -> None:
        """Give the replacement the original's name, documentation and signature, and the target's address.

        Pickling looks a function up by module and qualified name, and has to find this one.
        """
        replacement.__name__ = original.__name__
        replacement.__module__, replacement.__qualname__ = self.target
        replacement.__doc__ = original.__doc__
        replacement.__annotations__ = dict(original.__annotations__)
        own = {key: value for key, value in vars(original).items() if not key.startswith(_NOT_COPIED)}
        vars(replacement).update(own)
        vars(replacement)["__wrapped__"] = original


def unwrap(raw: Any) -> Any:
    """The plain function in a classmethod, staticmethod or property; anything else as it is."""
    if isinstance(raw, (classmethod, staticmethod)):
        return cast(Any, raw).__func__
    return raw.fget if isinstance(raw, property) else raw


def rewrap(raw: Any, function: Any) -> Any:
    """`function`, in a descriptor like `raw`."""
    if isinstance(raw, (classmethod, staticmethod)):
        return cast(Any, type(cast(Any, raw)))(function)
    return property(function, raw.fset, raw.fdel, raw.__doc__) if isinstance(raw, property) else function


def describe(value: Any) -> str:
    """Name an object and where it comes from, for a message."""
    if value is MISSING:
        return "nothing"
    value = unwrap(value)
    code = getattr(value, "__code__", None)
    if code is None:
        return repr(value)
    return f"{value.__module__}.{value.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def _owner(target: Target, module: ModuleType) -> tuple[Any, str]:
    *path, name = target.qualname.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, MISSING)
        if owner is MISSING:
            raise PatchError(f"{target} does not exist in the installed engine: nothing is called {part!r} there")
    return owner, name


def _own(owner: Any, name: str) -> Any:
    """What the owner itself holds, before any descriptor looks at it."""
    held = cast("Mapping[str, Any]", vars(owner))
    return held.get(name, MISSING)


def _inherited(owner: Any, name: str) -> Any:
    """The attribute as the class inherits it; a package's lazy attribute as it resolves."""
    if isinstance(owner, type):
        return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), MISSING)
    return getattr(owner, name, MISSING)
