"""A worker of the benchmark whose cases do what they are called. Spawned processes import this module: it is light."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from atom_patches.kernels.results import CaseReport, Ceilings, Machine
from atom_patches.kernels.suite import Key, Setup

MACHINE = Machine("test", "cpu", None, {}, Ceilings(1.0, 1.0, "made up"))
KEYS = [Key("f", i, "op", label) for i, label in enumerate(("fine", "crash", "hang", "poison", "last"))]


def serve(pipe: Connection, setup: Setup, ceilings: Ceilings | None) -> None:
    """A worker whose cases do what they are called."""
    if setup.device == "none":
        pipe.send("no such device")
        return
    if setup.device == "broken":
        os._exit(3)
    pipe.send((MACHINE, KEYS, {}))
    while True:
        key = pipe.recv()
        if key.label == "crash":
            os._exit(7)
        if key.label == "hang":
            time.sleep(60)
        report = CaseReport(key.family, key.operation, key.label, shape_class=f"{os.getpid()} {ceilings}")
        pipe.send((report, key.label == "poison"))
