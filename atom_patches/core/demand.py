"""Which live engines want which patches.

A configuration is remembered by weak reference: it lives as long as its engine does, and so does what it asks for. One
that takes no weak references is kept until its engine says that it has ended.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atom_patches.core.patch import Verdict


class Demand:
    """The verdicts of every live configuration, by patch id."""

    def __init__(self) -> None:
        # By identity: engines' configurations compare by value and are not hashable.
        self._entries: dict[int, tuple[Callable[[], Any], Mapping[str, Verdict]]] = {}

    def add(self, config: Any, verdicts: Mapping[str, Verdict]) -> None:
        """Remember what `config` wants; replaces what it wanted before."""
        self._entries[id(config)] = (_reference(config), verdicts)

    def discard(self, config: Any) -> None:
        """Forget `config`."""
        self._entries.pop(id(config), None)

    def clear(self) -> None:
        """Forget every configuration."""
        self._entries.clear()

    def wants(self, patch_id: str) -> bool:
        """Whether a live configuration wants the patch."""
        return any(verdicts[patch_id].ok for verdicts in self._live() if patch_id in verdicts)

    def collect(self) -> None:
        """Let go of engines that were dropped but sit in reference cycles."""
        gc.collect()

    def __bool__(self) -> bool:
        return any(True for _ in self._live())

    def _live(self) -> Iterator[Mapping[str, Verdict]]:
        for key, (reference, verdicts) in list(self._entries.items()):
            if reference() is None:
                del self._entries[key]
            else:
                yield verdicts


def _reference(config: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(config)
    except TypeError:
        return lambda: config
