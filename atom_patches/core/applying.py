"""Put patches in their places and take them out again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

from atom_patches.core import hooks, origin, stale
from atom_patches.core.member import Group, Member, Problem
from atom_patches.core.patch import PatchError, State, Target
from atom_patches.core.site import Change, Site


class Applier:
    """The places in one engine that patches stand at, in this process.

    Args:
        on_import: called with a module that an unapplied patch waits for, once it is imported.
    """

    def __init__(self, on_import: Callable[[ModuleType], None]) -> None:
        self.sites: dict[Target, Site] = {}
        self._on_import = on_import
        self._awaited: set[str] = set()

    def apply(self, group: Group) -> Problem | None:
        """Apply every wanted member of a group whose module is imported; the others wait for theirs.

        Returns:
            What went wrong. Nothing of the group is applied then.
        """
        changes: list[Change] = []
        for member in group.wanted:
            if member.settled:
                continue
            try:
                changes += self._apply(member)
            except PatchError as error:
                self.take_back(group.members)
                return Problem.of(member.patch, State.FAILED, str(error))
        stale.rebind(changes)
        return None

    def take_back(self, members: Iterable[Member]) -> None:
        """Remove these patches; a place without patches holds the engine's own object again."""
        changes: list[Change] = []
        for member in members:
            if member.applied and member.site is not None:
                changes.append(member.site.remove(member.patch))
        stale.rebind(changes)

    def wait_for(self, module: str) -> None:
        """Have `on_import` called when `module` is imported, or now."""
        if module not in self._awaited:
            self._awaited.add(module)
            hooks.when_imported(module, self._on_import)

    def leftovers(self) -> list[str]:
        """Where a patched original can still be reached, for a person to judge."""
        sites = [site for site in self.sites.values() if any(one.kind != "bootstrap" for one in site.patches)]
        notes = [
            f"{site.target}: {cls} overrides it, and is patched only where it calls this one"
            for site in sites
            for cls in stale.overriding(site)
        ]
        for target, holders in stale.captured(sites).items():
            notes.append(f"{target}: the original is still held by {', '.join(sorted(set(holders)))}")
        return notes

    def _apply(self, member: Member) -> list[Change]:
        target = member.patch.site
        module = hooks.imported(target.module)
        if module is None:
            member.set(State.PENDING, f"waits until this process imports {target.module}; {member.reason}")
            self.wait_for(target.module)
            return []
        site, note = self._site(target, module)
        change = site.add(member.patch)
        self.sites[target] = member.site = site
        member.set(State.APPLIED, "; ".join(filter(None, ["in place", member.reason, note])))
        return [change]

    def _site(self, target: Target, module: ModuleType) -> tuple[Site, str]:
        known = self.sites.get(target)
        if known is not None and known.patches:
            return known, ""
        site = Site(target, module)
        return site, origin.examine(site)
