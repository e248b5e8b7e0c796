"""What has to hold before a patch is applied: the environment, the engine's version, its source."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import TYPE_CHECKING, NamedTuple

from atom_patches.core import settings
from atom_patches.core.engine import Engine
from atom_patches.core.patch import Patch, State, Verdict

if TYPE_CHECKING:
    from packaging.requirements import Requirement

UNKNOWN = "unknown"


class Finding(NamedTuple):
    """Whether a patch fits the installed engine: `state` is pending (it does), or why it does not."""

    state: State
    reason: str

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
    """Decide from version and source alone, without importing the target, whether the patch may be applied."""
    version = engine_version(engine)
    if patch.kind == "bootstrap":
        return Finding(State.PENDING, reviewed_version(patch, version).reason)
    if patch.upstreamed is not None:
        upstream = patch.upstreamed(version)
        if upstream.ok:
            return Finding(State.UPSTREAMED, upstream.reason)
    return Finding(State.PENDING, reviewed_version(patch, version).reason)
