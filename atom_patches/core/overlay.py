"""The patches of one engine in this process: what is wanted, what fits, what is applied."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from atom_patches.core import discovery, gates, hooks, origin, report, settings, stale, stop
from atom_patches.core.demand import Demand
from atom_patches.core.engine import Engine
from atom_patches.core.log import logger
from atom_patches.core.member import UNDECIDED, Group, Member, Problem
from atom_patches.core.patch import Patch, PatchError, State, Target, Verdict
from atom_patches.core.site import Change, Site


class Overlay:
    """Brings one process into line with what its engine instances ask for."""

    def __init__(self, engine: Engine, patches: Iterable[Patch]) -> None:
        self.engine = engine
        self.members = {patch.id: Member(patch) for patch in patches}
        self.groups = self._grouped()
        self.sites: dict[Target, Site] = {}
        self.notes: list[str] = []
        self._demand = Demand()
        self._on_import: Callable[[ModuleType], None] = self.imported
        self._awaited: set[str] = set()
        self._said: set[str] = set()

    # Arming and decisions

    def arm(self, on_import: Callable[[ModuleType], None]) -> None:
        """Apply what needs no configuration, now or when its module is imported.

        Args:
            on_import: called with each awaited module; ends in `imported`.
        """
        self._on_import = on_import
        for group in self.groups:
            for member in group.members:
                member.wanted = member.patch.when is None and not gates.switched_off(member.patch)
                if member.wanted:
                    self._await(member.patch.site.module)

    def configure(self, config: Any, role: str) -> None:
        """Decide for one engine instance and apply, hold back or take back accordingly.

        Raises:
            PatchError: something that is needed or required cannot be applied. Nothing stays half applied, and
                the instance's wishes are forgotten.
        """
        try:
            self._check_environment()
            verdicts = self._decide(config)
            self._demand.add(config, verdicts)
            self._settle(verdicts)
        except PatchError:
            self._demand.discard(config)
            self._publish(config, role)
            raise
        self.engine.bind_cache_key(config, self._graph_changes())
        self._publish(config, role)
        self._announce(role)

    def imported(self, module: ModuleType) -> None:
        """Apply what waited for `module`.

        Raises:
            PatchError: it failed, and an engine instance of this process needs it.
        """
        for group in self.groups:
            waiting = [member for member in group.wanted if member.patch.site.module == module.__name__]
            if any(not member.settled for member in waiting):
                self._apply_late(group)
                self._refresh_report()

    def revert(self, *, bootstrap: bool = False) -> None:
        """Take every patch back, and forget what was asked for; the bootstrap hooks too, if `bootstrap`."""
        self._demand.clear()
        for group in self.groups:
            if group.bootstrap and not bootstrap:
                continue
            self._take_back(group.members)
            for member in group.members:
                member.wanted = False
                member.set(State.PENDING, UNDECIDED)

    def status(self) -> list[report.PatchReport]:
        """State and reason of every patch."""
        return [member.report() for _, member in sorted(self.members.items())]

    # Deciding

    def _grouped(self) -> list[Group]:
        by_name: dict[str, list[Member]] = {}
        for member in self.members.values():
            by_name.setdefault(member.patch.feature, []).append(member)
        return [Group(name, members) for name, members in sorted(by_name.items())]

    def _check_environment(self) -> None:
        features = [group.name for group in self.groups if not group.bootstrap]
        invalid = settings.invalid_values(features)
        if invalid:
            raise self._stopped(invalid)
        if multiprocessing.parent_process() is None:
            for message in settings.unknown_names(features):
                self._warn(message)

    def _decide(self, config: Any) -> dict[str, Verdict]:
        verdicts: dict[str, Verdict] = {}
        for group in self.groups:
            if not group.bootstrap:
                for member in group.members:
                    verdicts[member.patch.id] = self._verdict(member.patch, config)
        return verdicts

    def _verdict(self, patch: Patch, config: Any) -> Verdict:
        off = gates.switched_off(patch)
        if off is not None:
            return Verdict(False, off)
        if patch.when is None:
            return Verdict(True, "wanted by every configuration")
        try:
            return patch.when(config)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"its condition cannot be decided: {type(error).__name__}: {error}"
            version = gates.engine_version(self.engine)
            if patch.kind == "correctness" and gates.reviewed_version(patch, version).ok:
                raise self._stopped([f"{patch.id}: {reason}"]) from error
            return Verdict(False, reason)

    def _settle(self, verdicts: Mapping[str, Verdict]) -> None:
        if any(member.applied and not verdicts[name].ok for name, member in self._decided()):
            self._demand.collect()
        for name, member in self._decided():
            member.wanted = self._demand.wants(name)
        self._refuse({group: self._problems(group, verdicts) for group in self.groups if not group.bootstrap})
        for group in self.groups:
            self._take_back([member for member in group.members if member.applied and not member.wanted])
            self._explain_unwanted(group, verdicts)
        changes = [change for group in self.groups for change in self._apply_or_hold_back(group)]
        if changes:
            self._look_for_stale()

    def _decided(self) -> list[tuple[str, Member]]:
        """The members that a configuration decides about."""
        return [(name, member) for name, member in self.members.items() if member.patch.kind != "bootstrap"]

    def _problems(self, group: Group, verdicts: Mapping[str, Verdict]) -> list[Problem]:
        problems = [problem for member in group.wanted if (problem := self._misfit(member)) is not None]
        if group.required and not any(verdicts[member.patch.id].ok for member in group.members):
            reasons = {verdicts[member.patch.id].reason for member in group.members}
            variable = settings.feature_variable(group.name)
            reason = f"{variable}=1 requires it, but: {'; '.join(sorted(reasons))}"
            problems.append(Problem(group.members[0].patch, State.INACTIVE, reason))
        return problems

    def _misfit(self, member: Member) -> Problem | None:
        if member.applied:
            return self._displacement(member)
        finding = gates.fits(self.engine, member.patch)
        member.set(finding.state, finding.reason)
        if finding.fits or finding.state is State.UPSTREAMED:
            return None
        return Problem(member.patch, finding.state, finding.reason)

    @staticmethod
    def _displacement(member: Member) -> Problem | None:
        site = member.site
        if site is None or not site.displaced or site.covered:
            return None
        return Problem(member.patch, State.DISPLACED, member.report().reason)

    def _refuse(self, problems: Mapping[Group, Sequence[Problem]]) -> None:
        """Stop the launch for what is needed; hold the rest back with a warning."""
        fatal = [problem for group, found in problems.items() if group.fatal for problem in found]
        for group, found in problems.items():
            if found:
                needed = group.fatal
                group.hold_back(found)
                if not needed:
                    self._warn(self._without(group, found))
        if fatal:
            raise self._stopped([str(problem) for problem in fatal])

    def _explain_unwanted(self, group: Group, verdicts: Mapping[str, Verdict]) -> None:
        for member in group.members:
            verdict = verdicts.get(member.patch.id)
            if verdict is not None and not verdict.ok and not member.wanted:
                off = gates.switched_off(member.patch) is not None
                member.set(State.OFF if off else State.INACTIVE, verdict.reason)

    # Applying

    def _apply_or_hold_back(self, group: Group) -> list[Change]:
        """Apply a group; if that fails, nothing of it stays, and the launch stops if the group is needed."""
        changes: list[Change] = []
        for member in group.wanted:
            if member.settled:
                continue
            try:
                changes += self._apply(member)
            except PatchError as error:
                self._fail(group, Problem(member.patch, State.FAILED, str(error)))
                return []
        stale.rebind(changes)
        return changes

    def _fail(self, group: Group, problem: Problem) -> None:
        needed = group.fatal or (group.bootstrap and self._anything_required())
        self._take_back(group.members)
        group.hold_back([problem])
        if needed:
            raise self._stopped([str(problem)])
        self._warn(self._without(group, [problem]))

    def _anything_required(self) -> bool:
        return any(group.required for group in self.groups)

    def _apply_late(self, group: Group) -> None:
        """Apply members whose module has just been imported."""
        problems = [problem for member in group.wanted if (problem := self._misfit(member)) is not None]
        if not problems:
            self._apply_or_hold_back(group)
        elif self._demand:
            self._refuse({group: problems})
        else:
            group.hold_back(problems)

    def _apply(self, member: Member) -> list[Change]:
        target = member.patch.site
        module = hooks.imported(target.module)
        if module is None:
            member.set(State.PENDING, f"waits until this process imports {target.module}; {member.reason}")
            self._await(target.module)
            return []
        site = self.sites.get(target)
        note = ""
        if site is None:
            site = Site(target, module)
            note = origin.examine(site)
        change = site.add(member.patch)
        self.sites[target] = member.site = site
        member.set(State.APPLIED, "; ".join(filter(None, [f"in place; {member.reason}", note])))
        return [change]

    def _await(self, module: str) -> None:
        if module not in self._awaited:
            self._awaited.add(module)
            hooks.when_imported(module, self._on_import)

    def _take_back(self, members: Iterable[Member]) -> None:
        changes: list[Change] = []
        for member in members:
            if member.applied and member.site is not None:
                changes.append(member.site.remove(member.patch))
        stale.rebind(changes)

    def _look_for_stale(self) -> None:
        sites = [site for site in self.sites.values() if site.patches]
        self.notes = [
            f"{site.target}: {cls} defines its own and is not patched"
            for site in sites
            for cls in stale.overriding(site)
        ]
        for target, holders in stale.captured(sites).items():
            self.notes.append(f"{target}: the original is still held by {', '.join(sorted(set(holders)))}")

    # Telling

    def _graph_changes(self) -> dict[str, str]:
        version = discovery.code_version
        return {
            name: version()
            for name, member in sorted(self.members.items())
            if member.patch.changes_graph and member.wanted and member.state in (State.APPLIED, State.PENDING)
        }

    def _publish(self, config: Any, role: str) -> None:
        try:
            report.publish(
                role=role,
                engine=self.engine.name,
                version=gates.engine_version(self.engine),
                config=self.engine.describe(config),
                patches=self.status(),
                notes=self.notes,
            )
        except report.StateDirError as error:
            self._warn(str(error))

    def _refresh_report(self) -> None:
        try:
            report.refresh(self.engine.name, self.status(), self.notes)
        except report.StateDirError as error:
            self._warn(str(error))

    def _announce(self, role: str) -> None:
        on = [group for group in self.groups if not group.bootstrap and any(m.applied for m in group.members)]
        if not on:
            logger().debug("%s, %s: no patch is wanted", self.engine.name, role)
            return
        parts = [f"{group.name} ({sum(member.applied for member in group.members)} applied)" for group in on]
        logger().info("%s, %s: %s", self.engine.name, role, ", ".join(parts))

    def _warn(self, message: str) -> None:
        if settings.strict():
            raise self._stopped([f"{message} (an error because of ATOM_PATCHES_STRICT=1)"])
        if message not in self._said:
            self._said.add(message)
            logger().warning("%s", message)

    def _without(self, group: Group, problems: Iterable[Problem]) -> str:
        details = "; ".join(str(problem) for problem in problems)
        return f"{group.name} is not applied, {self.engine.name} behaves as it does without it: {details}"

    def _stopped(self, problems: Sequence[str]) -> PatchError:
        """The error that stops a launch, and tells why in one message."""
        stop.print_message_only()
        version = gates.engine_version(self.engine)
        head = f"atom_patches stops the launch of {self.engine.name} {version}:"
        return PatchError("\n".join([head, *(f"  - {problem}" for problem in problems)]))
