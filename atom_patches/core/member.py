"""One patch, or one group of patches, and where it stands in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from atom_patches.core import gates
from atom_patches.core.patch import Patch, State
from atom_patches.core.report import PatchReport
from atom_patches.core.site import Site, describe

UNDECIDED = "no engine configuration has been handed over in this process yet"


class Problem(NamedTuple):
    """Why a wanted patch, or a required group, is not applied."""

    subject: str
    reason: str
    state: State = State.INACTIVE
    kind: str = "required"

    @classmethod
    def of(cls, patch: Patch, state: State, reason: str) -> Problem:
        """A problem of one patch."""
        return cls(patch.id, reason, state, patch.kind)

    def __str__(self) -> str:
        return f"{self.subject} ({self.kind}, {self.state}): {self.reason}"


class Member:
    """One patch and where it stands."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.wanted = False
        self.site: Site | None = None
        self.state = State.PENDING
        self.reason = UNDECIDED

    @property
    def applied(self) -> bool:
        """Whether the patch is in the chain of its site."""
        return self.site is not None and self.patch in self.site.patches

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do: applied, or unnecessary."""
        return self.applied or self.state is State.UPSTREAMED

    def set(self, state: State, reason: str) -> None:
        """Record where the patch stands, and why."""
        self.state, self.reason = state, reason

    def report(self) -> PatchReport:
        """Where the patch stands now; the live object has the last word."""
        state, reason = self.state, self.reason
        if self.applied and self.site is not None and self.site.displaced:
            state = State.DISPLACED
            reason = (
                f"{self.patch.target} was patched, but holds {describe(self.site.live())} now: "
                "something replaced it later; load that after this package, or without it"
            )
        return PatchReport(self.patch.id, state.value, reason)


class Group:
    """Patches that are applied together or not at all."""

    def __init__(self, name: str, members: Iterable[Member]) -> None:
        self.name = name
        self.members = sorted(members, key=lambda member: member.patch.sort_key)

    @property
    def wanted(self) -> list[Member]:
        """The members that some engine instance of this process asks for."""
        return [member for member in self.members if member.wanted]

    @property
    def bootstrap(self) -> bool:
        """Whether the group hands configurations over, rather than changing behaviour."""
        return any(member.patch.kind == "bootstrap" for member in self.members)

    @property
    def required(self) -> bool:
        """Whether the environment says that the launch must not go on without it."""
        return gates.required(self.name)

    @property
    def fatal(self) -> bool:
        """Whether a launch stops when a wanted member cannot be applied."""
        return self.required or any(member.patch.kind == "correctness" for member in self.wanted)

    def hold_back(self, problems: Iterable[Problem]) -> None:
        """Want nothing of the group, and record why: its own reason for each culprit, a reference for the rest.

        A member that another engine instance has in place stays as it is.
        """
        culprits = {problem.subject: problem for problem in problems}
        if not culprits:
            return
        for member in self.wanted:
            problem = culprits.get(member.patch.id)
            if problem is not None:
                member.set(problem.state, problem.reason)
            elif not member.applied:
                member.set(State.INACTIVE, f"group {self.name} is held back by {', '.join(culprits)}")
            member.wanted = False
