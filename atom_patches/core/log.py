"""The overlay's logger. Engines configure handlers for themselves only, so it brings one if nobody did."""

from __future__ import annotations

import logging

from atom_patches.core import settings

NAME = "atom_patches"


def logger() -> logging.Logger:
    """The logger, able to print in a process where nobody set up logging for it.

    Its level is what `ATOM_LOG_LEVEL` says; else what the application set, or INFO where it set up nothing.
    """
    log = logging.getLogger(NAME)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
    asked = settings.log_level()
    if asked is not None:
        log.setLevel(asked.upper())
    return log
