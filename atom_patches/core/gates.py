"""What has to hold before a patch is applied: the environment, the engine's version, its source."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import TYPE_CHECKING, NamedTuple

from atom_patches.core import drift, reviewed, settings
from atom_patches.core.engine import Engine
from atom_patches.core.patch import Patch, State, Target, Verdict
from atom_patches.core.source import SourceError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

UNKNOWN = "unknown"


class Finding(NamedTuple):
    """Whether a patch fits the installed engine: `state` is pending (it does), or why it does not.

    `details` lists the changed places of a drifted source, as `drift.diff` does.
    """

    state: State
    reason: str
    details: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the patch may be applied."""
        return self.state is State.PENDING


def switched_off(patch: Patch) -> str | None:
    """The environment variable that keeps the patch off, if there is one."""
    if settings.master() == "0":
        return "ATOM_PATCHES=0"
    if settings.feature(patch.feature) == "0":
        return f"{settings.feature_variable(patch.feature)}=0"
    return None


def required(feature: str) -> bool:
    """Whether the environment says that the launch must not go on without this feature."""
    return settings.feature(feature) == "1"


def engine_version(engine: Engine) -> str:
    """The version that the engine's package states, else the one of its distribution; `unknown` without either."""
    stated = getattr(sys.modules.get(engine.package), "__version__", None)
    if isinstance(stated, str):
        return stated
    for name in engine.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return UNKNOWN


def reviewed_version(patch: Patch, version: str) -> Verdict:
    """Whether `version` is one that the patch was reviewed for. Source builds often state none of use."""
    from packaging.version import InvalidVersion

    supports = _requirement(patch.supports)
    try:
        ok = supports.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        ok = False
    return Verdict(ok, f"{supports.name} {version} is {'' if ok else 'not '}in {supports.specifier}")


def _requirement(text: str) -> Requirement:
    from packaging.requirements import Requirement

    return Requirement(text)


def fits(engine: Engine, patch: Patch) -> Finding:
    """Decide from version and source alone, without importing the target, whether the patch may be applied.

    The source outranks the version: source builds of one release state all sorts of versions, and a release may
    leave a function as it was.
    """
    version = engine_version(engine)
    stated = reviewed_version(patch, version)
    if patch.kind == "bootstrap":
        return Finding(State.PENDING, stated.reason)
    if patch.upstreamed is not None:
        upstream = patch.upstreamed(version)
        if upstream.ok:
            return Finding(State.UPSTREAMED, upstream.reason)
    faults = [fault for target in reviewed.installed(patch) if (fault := _fault(engine, patch, target)) is not None]
    if not faults:
        note = "" if stated.ok else f"; {stated.reason}, but the source is as reviewed"
        return Finding(State.PENDING, f"the source of {engine.name} {version} is as reviewed{note}")
    details = tuple(detail for fault in faults for detail in fault.details)
    if stated.ok:
        return Finding(State.DRIFTED, f"{_told(faults)}. {_advice(patch)}", details)
    return Finding(State.UNSUPPORTED, f"{stated.reason}, and {_told(faults)}. {_advice(patch)}", details)


class _Fault(NamedTuple):
    """Why the source of one target is not one that was reviewed."""

    reason: str
    details: tuple[str, ...] = ()


def _fault(engine: Engine, patch: Patch, target: Target) -> _Fault | None:
    try:
        lines = drift.current_lines(target)
    except SourceError as error:
        return _Fault(f"{target} is gone: {error}")
    known = reviewed.fingerprints(engine, target, patch)
    current = drift.fingerprint(lines)
    if any(one.hash == current.hash for one in known.values()):
        return None
    if not known:
        return _Fault(f"no reviewed source of {target} is recorded")
    changes = drift.diff(list(known.values()), lines)
    return _Fault(f"{target} changed ({changes[0]}{', …' if len(changes) > 1 else ''})", tuple(changes))


def _told(faults: list[_Fault]) -> str:
    return "; ".join(fault.reason for fault in faults)


def _advice(patch: Patch) -> str:
    command = "python -m atom_patches"
    return (
        f"Install {patch.supports}; or read `{command} explain {patch.id}` and, if the patch still fits, "
        f"run `{command} accept {patch.id}`"
    )
