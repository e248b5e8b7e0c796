"""What an overlay says: in the log, in the process's state file, and when it stops a launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from atom_patches.core import gates, report, settings, stop
from atom_patches.core.engine import Engine
from atom_patches.core.log import logger
from atom_patches.core.member import Group, Problem
from atom_patches.core.patch import PatchError


class Teller:
    """Speaks for the overlay of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._said: set[str] = set()

    def publish(self, config: Any, role: str, patches: Iterable[report.PatchReport], notes: Iterable[str]) -> None:
        """Write this process's state file."""
        try:
            report.publish(
                role=role,
                engine=self._engine.name,
                version=gates.engine_version(self._engine),
                config=self._engine.describe(config),
                patches=patches,
                notes=notes,
            )
        except report.StateDirError as error:
            self.warn(str(error))

    def refresh(self, patches: Iterable[report.PatchReport], notes: Iterable[str]) -> None:
        """Bring the state file up to date, if there is one."""
        try:
            report.refresh(self._engine.name, patches, notes)
        except report.StateDirError as error:
            self.warn(str(error))

    def announce(self, role: str, groups: Iterable[Group]) -> None:
        """One line about what is on."""
        parts: list[str] = []
        for group in groups:
            if not group.bootstrap and group.wanted:
                applied = sum(member.applied for member in group.wanted)
                parts.append(f"{group.name} ({applied} of {len(group.wanted)} patches in place)")
        if parts:
            logger().info("%s %s: %s", self._engine.name, role, ", ".join(parts))
        else:
            logger().debug("%s %s: nothing is asked for", self._engine.name, role)

    def held_back(self, group: Group, problems: Iterable[Problem]) -> None:
        """Warn that the engine runs without a group.

        Raises:
            PatchError: `ATOM_PATCHES_STRICT=1`.
        """
        details = "; ".join(str(problem) for problem in problems)
        self.warn(f"{group.name} is not applied, {self._engine.name} behaves as it does without it: {details}")

    def warn(self, message: str) -> None:
        """Warn once per process.

        Raises:
            PatchError: `ATOM_PATCHES_STRICT=1`.
        """
        if settings.strict():
            raise self.stopped([f"{message} (an error because of ATOM_PATCHES_STRICT=1)"])
        if message not in self._said:
            self._said.add(message)
            logger().warning("%s", message)

    def stopped(self, problems: Sequence[Any]) -> PatchError:
        """The error that stops a launch, and tells why in one message."""
        stop.print_message_only()
        version = gates.engine_version(self._engine)
        head = f"atom_patches stops the launch of {self._engine.name} {version}:"
        told = [str(problem).replace("\n", "\n  ") for problem in problems]
        return PatchError("\n".join([head, *(f"  - {problem}" for problem in told)]))
