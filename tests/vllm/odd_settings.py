"""Give the second rank another environment than the first."""

from __future__ import annotations

import os


def install() -> None:
    """Set on rank 1 alone what ODD_SETTING says, as NAME=VALUE."""
    if os.environ["RANK"] == "1":
        name, _, value = os.environ["ODD_SETTING"].partition("=")
        os.environ[name] = value
