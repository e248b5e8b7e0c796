"""Record every collective that this rank's engine enters, those through shared memory included.

A rank that enters nothing for a while, in the middle of its work, says in its log where it is and what came before:
that is how ranks look that wait for each other, and the log is shown when a launch does not end in time.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from contextlib import ExitStack
from typing import Any

import torch
from fuzz_dp.recorder import Entry, Recorder, call_site, recording, stacks, watch

QUIET = 60.0  # seconds
SHOWN = 8

_recorders: list[Recorder] = []
_for_good = ExitStack()  # the recording ends with the process


def install() -> None:
    """From now on; once for a process."""
    if _recorders:
        _recorders[0].cut()
        return
    recorder = _for_good.enter_context(recording())
    _recorders.append(recorder)
    _watch_shared_memory(recorder)
    threading.Thread(target=_complain, args=(recorder,), daemon=True).start()


def report() -> list[dict[str, Any]]:
    """What this rank entered, as JSON can hold it."""
    return [dataclasses.asdict(entry) for entry in _recorders[0].cut()]


def entries(reported: list[dict[str, Any]]) -> list[Entry]:
    """The report of one rank, read back."""
    frozen: list[dict[str, Any]] = [
        {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()} for entry in reported
    ]
    return [Entry(**entry) for entry in frozen]


def _watch_shared_memory(recorder: Recorder) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    def entry(name: str, shared: Any, tensor: torch.Tensor) -> Entry:
        communicator = shared.communicator
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(
            name, communicator.unique_name, tuple(communicator.ranks), tuple(tensor.shape), dtype, site=call_site()
        )

    watch(recorder, Shared, "all_reduce", lambda shared, tensor, *_, **__: entry("allreduce", shared, tensor))
    watch(
        recorder,
        Shared,
        "all_gather_into_tensor",
        lambda shared, _, tensor, *__, **___: entry("_allgather_base", shared, tensor),
    )
    watch(recorder, Shared, "gather", lambda shared, tensor, *_, **__: entry("gather", shared, tensor))


def _complain(recorder: Recorder) -> None:
    """Say once where this rank is, if it was busy and is silent now."""
    seen = 0
    pause = threading.Event()
    while True:
        pause.wait(QUIET)
        now = recorder.peek()
        if seen and len(now) == seen:
            last = "\n".join(f"{entry}\n    at {entry.site}" for entry in now[-SHOWN:])
            print(f"nothing entered for {QUIET:.0f} s; the last were:\n{last}\n{stacks()}", file=sys.stderr, flush=True)
            return
        seen = len(now)
