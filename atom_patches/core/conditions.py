"""What the conditions of patches have in common."""

from __future__ import annotations

from collections.abc import Iterable

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
