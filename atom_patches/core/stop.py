"""End a launch with one message.

A stopped launch raises `PatchError` like any other error: a script or a notebook may catch it, and frames
unwind. Nobody is helped by its traceback, though: it shows the engine's start-up code, where nothing is wrong.
So an uncaught `PatchError` prints its message alone. The interpreter then exits with status 1, as always.
"""

from __future__ import annotations

import sys
from types import TracebackType

from atom_patches.core.patch import PatchError


def print_message_only() -> None:
    """From now on, an uncaught `PatchError` of this process prints its message without a traceback.

    Called when a launch is being stopped, never before; every other exception goes to the hook that was there.
    """
    if getattr(sys.excepthook, "__module__", None) == __name__:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, PatchError):
            before(kind, error, traceback)
            return
        sys.stdout.flush()
        print(f"\n{error}", file=sys.stderr, flush=True)

    hook.__module__ = __name__
    sys.excepthook = hook
