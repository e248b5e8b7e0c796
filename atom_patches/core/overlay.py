"""The patches of one engine in this process: what is wanted, what fits, and what follows from that."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from atom_patches.core import discovery, gates, settings
from atom_patches.core.applying import Applier
from atom_patches.core.demand import Demand
from atom_patches.core.engine import Engine
from atom_patches.core.member import UNDECIDED, Group, Member, Problem
from atom_patches.core.patch import Patch, PatchError, State, Verdict
from atom_patches.core.report import PatchReport
from atom_patches.core.telling import Teller

Verdicts = Mapping[str, Verdict]


class Overlay:
    """Brings one process into line with what its engine instances ask for.

    Args:
        engine: the engine.
        patches: its patches.
        on_import: called with each module that a patch waits for; has to end in `imported`.
    """

    def __init__(self, engine: Engine, patches: Iterable[Patch], on_import: Callable[[ModuleType], None]) -> None:
        self.engine = engine
        self.members = {patch.id: Member(patch) for patch in patches}
        self.groups = _grouped(self.members.values())
        self.notes: list[str] = []
        self._applier = Applier(on_import)
        self._teller = Teller(engine)
        self._demand = Demand()
        self._failed_late: dict[Group, PatchError] = {}

    def arm(self) -> None:
        """Apply what needs no configuration, now or when its module is imported."""
        for member in self.members.values():
            member.wanted = member.patch.when is None and not gates.switched_off(member.patch)
            if member.wanted:
                member.set(State.PENDING, f"waits until this process imports {member.patch.site.module}")
        # A module that is imported already is told of at once, and only once, for all patches in it.
        for member in self.members.values():
            if member.wanted:
                self._applier.wait_for(member.patch.site.module)

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
            self._mark_wanted()
            self._teller.publish(config, role, self.status(), self.notes)
            raise
        self.engine.bind_cache_key(config, self._graph_changes())
        self._teller.publish(config, role, self.status(), self.notes)
        self._teller.announce(role, self.groups)

    def release(self, config: Any) -> None:
        """Forget what the engine instance of `config` wants."""
        self._demand.discard(config)
        self._mark_wanted()

    def imported(self, module: ModuleType) -> None:
        """Apply what waited for `module`.

        Raises:
            PatchError: it failed, and an engine instance of this process needs it.
        """
        for group in self.groups:
            waiting = [member for member in group.wanted if member.patch.site.module == module.__name__]
            if any(not member.settled for member in waiting):
                try:
                    self._apply_late(group)
                except PatchError as error:
                    self._failed_late[group] = error
                    raise
                finally:
                    self._teller.refresh(self.status(), self.notes)

    def confirm(self) -> None:
        """Make sure that no error of `imported` was lost: an engine may take it for a module that it can do without.

        Raises:
            PatchError: what an import raised, if a live engine instance still asks for that patch.
        """
        for group, error in self._failed_late.items():
            if any(self._demand.wants(member.patch.id) for member in group.members):
                raise error

    def revert(self, *, bootstrap: bool = False) -> None:
        """Take every patch back, and forget what was asked for; the bootstrap hooks too, if `bootstrap`."""
        self._demand.clear()
        self._failed_late.clear()
        for group in self.groups:
            if bootstrap or not group.bootstrap:
                self._applier.take_back(group.members)
                for member in group.members:
                    member.wanted = False
                    member.set(State.PENDING, UNDECIDED)

    def status(self) -> list[PatchReport]:
        """State and reason of every patch."""
        return [member.report() for _, member in sorted(self.members.items())]

    # Deciding

    def _check_environment(self) -> None:
        features = [group.name for group in self._features()]
        invalid = settings.invalid_values(features)
        if invalid:
            raise self._teller.stopped(invalid)
        if multiprocessing.parent_process() is None:
            for message in settings.unknown_names(features):
                self._teller.warn(message)

    def _features(self) -> list[Group]:
        """The groups that a configuration decides about."""
        return [group for group in self.groups if not group.bootstrap]

    def _decide(self, config: Any) -> dict[str, Verdict]:
        members = [member for group in self._features() for member in group.members]
        return {member.patch.id: self._verdict(member.patch, config) for member in members}

    def _verdict(self, patch: Patch, config: Any) -> Verdict:
        off = gates.switched_off(patch)
        if off is not None:
            return Verdict(False, off)
        if patch.when is None:
            return Verdict(True, "wanted by every configuration")
        try:
            return patch.when(config)
        except (PatchError, AttributeError, LookupError, TypeError, ValueError) as error:
            return self._without_answer(patch, error)

    def _without_answer(self, patch: Patch, error: Exception) -> Verdict:
        """What follows from a condition that raised: it refuses the configuration, or it cannot be decided.

        Raises:
            PatchError: the release is one that the patch was written for.
        """
        finding = gates.fits(self.engine, patch)
        if finding.state is State.UPSTREAMED:
            return Verdict(False, finding.reason)
        if isinstance(error, PatchError):
            if finding.state is State.UNSUPPORTED:
                # Which options the patch would serve does not matter where it serves none.
                return Verdict(True, "the configuration asks for it")
            raise self._teller.stopped([error]) from error
        reason = f"its condition cannot be decided: {type(error).__name__}: {error}"
        version = gates.engine_version(self.engine)
        if gates.reviewed_version(patch, version).ok and patch.kind == "correctness":
            raise self._teller.stopped([Problem.of(patch, State.FAILED, reason)]) from error
        # An engine that the patch was not written for may lack what the condition asks about.
        self._teller.warn(
            f"{patch.feature} is not applied, and whether this configuration asks for it is not known: it was not "
            f"written for {self.engine.name} {version} ({type(error).__name__}: {error})"
        )
        return Verdict(False, reason)

    def _settle(self, verdicts: Verdicts) -> None:
        if any(member.applied and not verdicts[name].ok for name, member in self.members.items() if name in verdicts):
            self._demand.collect()
        self._mark_wanted()
        self._explain_unwanted(verdicts)
        self._refuse({group: self._problems(group, verdicts) for group in self._features()})
        self._tell_unserved(verdicts)
        before = self._applied()
        for group in self._features():
            self._applier.take_back([member for member in group.members if not member.wanted])
            self._apply(group)
        if self._applied() - before:
            self.notes = self._applier.leftovers()

    def _mark_wanted(self) -> None:
        for group in self._features():
            for member in group.members:
                member.wanted = self._demand.wants(member.patch.id)

    def _explain_unwanted(self, verdicts: Verdicts) -> None:
        for name, verdict in verdicts.items():
            member = self.members[name]
            if not verdict.ok and not member.wanted:
                off = gates.switched_off(member.patch) is not None
                member.set(State.OFF if off else State.INACTIVE, verdict.reason)

    def _tell_unserved(self, verdicts: Verdicts) -> None:
        """Say what was asked for and is left to the engine, where the engine is started."""
        if multiprocessing.parent_process() is not None:
            return
        for group in self._features():
            asked = [verdicts[member.patch.id] for member in group.members]
            reasons = sorted({verdict.reason for verdict in asked if verdict.asked and not verdict.ok})
            if reasons:
                self._teller.held_back(group, [Problem(group.name, "; ".join(reasons), kind="asked for")])

    def _problems(self, group: Group, verdicts: Verdicts) -> list[Problem]:
        problems = [problem for member in group.wanted if (problem := self._misfit(member)) is not None]
        asked = [verdicts[member.patch.id] for member in group.members]
        if group.required and not any(verdict.ok for verdict in asked):
            variable = settings.feature_variable(group.name)
            reasons = "; ".join(sorted({verdict.reason for verdict in asked}))
            problems.append(Problem(group.name, f"{variable}=1 requires it, but {reasons}. Ask for it, or unset that"))
        return problems

    def _misfit(self, member: Member) -> Problem | None:
        """Why a wanted patch cannot be applied, or cannot stay."""
        patch, site = member.patch, member.site
        if member.applied and site is not None:
            lost = site.displaced and not site.covered
            return Problem.of(patch, State.DISPLACED, member.report().reason) if lost else None
        try:
            finding = gates.fits(self.engine, patch)
        except PatchError as error:
            return Problem.of(patch, State.FAILED, str(error))
        member.set(finding.state, finding.reason)
        fine = finding.fits or finding.state is State.UPSTREAMED
        return None if fine else Problem.of(patch, finding.state, finding.reason)

    def _refuse(self, problems: Mapping[Group, Sequence[Problem]]) -> None:
        """Stop the launch for what is needed; hold the rest back with a warning."""
        fatal = [told for group, found in problems.items() if group.fatal for told in self._teller.told(group, found)]
        bearable = [group for group, found in problems.items() if found and not group.fatal]
        for group in bearable:
            self._applier.take_back(group.members)
        for group, found in problems.items():
            group.hold_back(found)
        if fatal:
            raise self._teller.stopped(fatal)
        for group in bearable:
            self._teller.held_back(group, problems[group])

    # Applying

    def _apply(self, group: Group) -> None:
        """Apply a group; if that fails, nothing of it stays, and the launch stops if it is needed."""
        needed = group.fatal or (group.bootstrap and any(one.required for one in self.groups))
        problem = self._applier.apply(group)
        if problem is None:
            return
        group.hold_back([problem])
        if needed:
            raise self._teller.stopped([problem])
        self._teller.held_back(group, [problem])

    def _apply_late(self, group: Group) -> None:
        """Apply members whose module has just been imported."""
        problems = [problem for member in group.wanted if (problem := self._misfit(member)) is not None]
        if not problems:
            self._apply(group)
        elif self._demand:
            self._applier.take_back(group.members)
            self._refuse({group: problems})
        else:
            group.hold_back(problems)

    def _applied(self) -> set[str]:
        return {name for name, member in self.members.items() if member.applied}

    def _graph_changes(self) -> dict[str, str]:
        """The graph-changing patches that are on in this process, or will be: code's version and settings of each."""
        on = [name for name, member in sorted(self.members.items()) if member.wanted and member.patch.changes_graph]
        needed = [name for name in on if self.members[name].state is not State.UPSTREAMED]
        return {name: _graph_version(self.members[name].patch) for name in needed}


def _graph_version(patch: Patch) -> str:
    return " ".join([discovery.code_version(), *(f"{name}={settings.value(name)}" for name in patch.graph_settings)])


def _grouped(members: Iterable[Member]) -> list[Group]:
    by_name: dict[str, list[Member]] = {}
    for member in members:
        by_name.setdefault(member.patch.feature, []).append(member)
    return [Group(name, found) for name, found in sorted(by_name.items())]
