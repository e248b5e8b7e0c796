"""What the conditions of patches have in common."""

from __future__ import annotations

from collections.abc import Iterable

from atom_patches.core import settings
from atom_patches.core.patch import PatchError


def refusals(lines: Iterable[str]) -> list[str]:
    """What speaks against serving a configuration that asks for a patch, line by line.

    Raises:
        PatchError: the configuration lacks what is looked at, as that of another release may. That it asks is known all
            the same: the overlay then says that the release is not supported.
    """
    try:
        return list(lines)
    except (AttributeError, LookupError, TypeError) as error:
        raise PatchError(
            f"the configuration asks for a feature, but cannot be judged: {type(error).__name__}: {error}"
        ) from error


def refuse_if_off(group: str, option: str) -> None:
    """For what one of the engine's options requires: where a feature is switched off, its condition is not asked.

    Raises:
        PatchError: the environment keeps the feature off.
    """
    if settings.feature(group) == "0":
        raise PatchError(
            f"{option} requires {group}, but {settings.feature_variable(group)}=0 keeps it off\n"
            "Leave one of the two out"
        )
