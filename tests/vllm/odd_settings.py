"""Give the second rank another environment than the first."""

from __future__ import annotations

import os


def install() -> None:
    """Plan with another least number of rows on rank 1."""
    if os.environ["RANK"] == "1":
        os.environ["ATOM_PCP_MIN_ROWS"] = "7"
