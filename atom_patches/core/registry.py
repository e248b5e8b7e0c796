"""All engines' overlays in this process, and the one lock around them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from atom_patches.core import discovery, settings
from atom_patches.core.engine import Engine
from atom_patches.core.overlay import Overlay
from atom_patches.core.patch import Patch
from atom_patches.core.report import PatchReport


class Registry:
    """Decides about, applies and takes back the patches of the engines that it was armed for."""

    def __init__(self) -> None:
        self._overlays: dict[str, Overlay] = {}
        self._lock = threading.Lock()
        self._postponed: list[tuple[Overlay, ModuleType]] = []
        self._running: Engine | None = None

    @property
    def running(self) -> Engine | None:
        """The engine that handed over a configuration last, in this process."""
        return self._running

    def arm(self, engine: Engine, patches: Sequence[Patch] | None = None) -> None:
        """Let the patches of `engine` wait for their targets; a second time changes nothing.

        Args:
            engine: the engine.
            patches: its patches; None: those that are declared below its package.
        """
        if settings.master() == "0" or engine.name in self._overlays:
            return
        if not self._overlays and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        declared = discovery.load(engine) if patches is None else patches
        overlay = Overlay(engine, declared, lambda module: self._imported(overlay, module))
        self._overlays[engine.name] = overlay
        overlay.arm()

    def configure(self, engine_name: str, config: Any, role: str) -> None:
        """Decide about every patch for one engine instance, and bring the process into line with that.

        Args:
            engine_name: which engine the configuration belongs to.
            config: the engine's configuration; kept by weak reference only.
            role: what this process does for that engine instance: `"api server"`, `"engine core"`, `"worker"`.

        Raises:
            PatchError: a patch that is needed, or that was required by the environment, cannot be applied.
        """
        overlay = self._overlays.get(engine_name)
        if overlay is None or settings.master() == "0":
            return
        with self._lock:
            self._running = overlay.engine
            overlay.configure(config, role)
        self._catch_up()

    def confirm(self, engine_name: str) -> None:
        """Raise again what could not be applied when its module was imported, in case nobody let that pass.

        Args:
            engine_name: which engine is about to serve.

        Raises:
            PatchError: a live engine instance of this process needs the patch.
        """
        overlay = self._overlays.get(engine_name)
        if overlay is not None:
            with self._lock:
                overlay.confirm()
            self._catch_up()

    def release(self, engine_name: str, config: Any) -> None:
        """Forget what an engine instance that has ended asked for; the next `configure` draws the consequences.

        Args:
            engine_name: which engine the configuration belongs to.
            config: the configuration that was handed to `configure`; an unknown one is none to forget.
        """
        overlay = self._overlays.get(engine_name)
        if overlay is not None:
            with self._lock:
                overlay.release(config)
            self._catch_up()

    def revert(self, engine_name: str, *, bootstrap: bool = False) -> None:
        """Take back every patch of an engine: the objects that it shipped with stand again.

        A later `configure` applies what its configuration asks for.

        Args:
            engine_name: the engine.
            bootstrap: take back the hooks that hand configurations over too, for good.
        """
        with self._lock:
            self._overlays[engine_name].revert(bootstrap=bootstrap)
        self._catch_up()

    def status(self, engine_name: str) -> list[PatchReport]:
        """State and reason of every patch of an engine, from the live objects."""
        overlay = self._overlays.get(engine_name)
        return [] if overlay is None else overlay.status()

    def overlay(self, engine_name: str) -> Overlay:
        """The overlay of an armed engine.

        Raises:
            KeyError: the engine was not armed in this process.
        """
        return self._overlays[engine_name]

    def _imported(self, overlay: Overlay, module: ModuleType) -> None:
        # A thread that is importing holds that module's import lock. It must not wait for a thread that is
        # applying patches, which may be waiting for that import. Nor may one application interrupt another of
        # the same thread: a builder may import what patches of its own group wait for. So the lock is not
        # re-entrant, and what finds it taken comes after.
        self._postponed.append((overlay, module))
        self._catch_up()

    def _catch_up(self) -> None:
        """Do what was postponed, unless the lock is taken: whoever holds it does so after letting go."""
        while self._postponed and self._lock.acquire(blocking=False):
            try:
                # Another thread may have done it between the two conditions.
                if self._postponed:
                    overlay, module = self._postponed.pop()
                    overlay.imported(module)
            finally:
                self._lock.release()

    def _after_fork(self) -> None:
        """A thread that held the lock does not exist in the child."""
        self._lock = threading.Lock()


REGISTRY = Registry()
"""The registry that bootstrap hooks report to."""
