"""The overlay's logger. Engines configure handlers for themselves only, so it brings one if nobody did."""

from __future__ import annotations

import logging

NAME = "atom_patches"


def logger() -> logging.Logger:
    """The logger, able to print at INFO in a process where nobody set up logging for it."""
    log = logging.getLogger(NAME)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
    return log
