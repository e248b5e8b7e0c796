"""What an overlay says: in the log, in the process's state file, and when it stops a launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from atom_patches.core import gates, report, settings, stop
from atom_patches.core.engine import Engine
from atom_patches.core.log import logger
from atom_patches.core.member import Group, Problem
from atom_patches.core.patch import PatchError, State


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
        """One line about what is on, and what is off and why; not again while nothing changes."""
        on, off = _on_and_off(group for group in groups if not group.bootstrap)
        line = f"{self._engine.name} {role}: {', '.join(on) or 'nothing is on'}"
        if off:
            line += f"; off: {'; '.join(off)}"
        if line not in self._said:
            self._said.add(line)
            logger().info("%s", line)

    def held_back(self, group: Group, problems: Iterable[Problem]) -> None:
        """Warn that the engine runs without a group.

        Raises:
            PatchError: `ATOM_PATCHES_STRICT=1`.
        """
        details = "; ".join(str(problem) for problem in self.told(group, problems))
        self.warn(f"{group.name} is not applied, {self._engine.name} behaves as it does without it: {details}")

    def told(self, group: Group, problems: Iterable[Problem]) -> list[Problem]:
        """The problems of a group as a person is told them: a release that it does not support is one sentence."""
        found = list(problems)
        misfits = [problem for problem in found if problem.state is State.UNSUPPORTED]
        if not misfits:
            return found
        patch = next(member.patch for member in group.members if member.patch.id == misfits[0].subject)
        release = f"{self._engine.name} {gates.engine_version(self._engine)}"
        more = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
        reason = (
            f"{release} was not reviewed, and the code there is not the one that {patch.id}{more} was written for. "
            f"Install {patch.supports}, or leave out what asks for it; `python -m atom_patches explain {group.name}` "
            "says what changed"
        )
        kind = "correctness" if any(problem.kind == "correctness" for problem in misfits) else patch.kind
        rest = [problem for problem in found if problem not in misfits]
        return [Problem(group.name, reason, State.UNSUPPORTED, kind), *rest]

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


def _on_and_off(groups: Iterable[Group]) -> tuple[list[str], list[str]]:
    """What is on, and what is off, alike ones together with the first reason."""
    on: list[str] = []
    off: dict[str, list[str]] = {}
    for group in groups:
        if group.wanted:
            applied = sum(member.applied for member in group.wanted)
            so_far = "" if applied == len(group.wanted) else " so far"
            on.append(f"{group.name} ({applied} of {len(group.wanted)} patches in place{so_far})")
        else:
            off.setdefault(group.members[0].report().reason, []).append(group.name)
    return on, [f"{', '.join(names)} ({reason})" for reason, names in off.items()]
