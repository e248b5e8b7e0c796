"""A process that the kernel kills when its parent has ended."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal

logger = logging.getLogger("atom_patches.pcp")

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that this process gets when the thread that started it ends."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends; it may be stopped, or stuck where signals are not handled."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("this worker may outlive its engine: %s", os.strerror(ctypes.get_errno()))
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)
