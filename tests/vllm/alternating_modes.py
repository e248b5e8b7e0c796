"""Make `auto` run each step's recurrent layers another way than the step before, as other costs could."""

from __future__ import annotations

import itertools

MODES = ("relay", "two_pass", "redundant")


def install() -> None:
    """Take one mode after the other. All ranks count the same steps, so they take the same."""
    from atom_patches.runtime import pcp_gdn_cost

    modes = itertools.cycle(MODES)
    pcp_gdn_cost.choose = lambda *args: next(modes)  # type: ignore[assignment]
