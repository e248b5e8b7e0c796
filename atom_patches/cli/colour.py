"""Colours on a terminal, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, TextIO

Colour = Literal["green", "cyan", "red", "grey"]
Paint = Callable[[str, Colour], str]

CODES: dict[Colour, str] = {"green": "32", "cyan": "36", "red": "1;31", "grey": "90"}


def painter(stream: TextIO) -> Paint:
    """What colours text for `stream`: nothing if that is no terminal, or the user wants none (https://no-color.org)."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return painted if wanted else plain


def plain(text: str, colour: Colour) -> str:
    """The text as it is."""
    return text


def painted(text: str, colour: Colour) -> str:
    """The text in a colour."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m"
