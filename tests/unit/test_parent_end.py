"""A process that asked for it ends with its parent, even if it is stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from atom_patches.vllm.adapters.parent_end import end_with_parent

FORK = multiprocessing.get_context("fork")


def child(asks: bool, out: Connection) -> None:
    if asks:
        end_with_parent()
    out.send(os.getpid())
    time.sleep(60)


def parent(asks: bool, out: Connection) -> None:
    FORK.Process(target=child, args=(asks, out)).start()
    time.sleep(60)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("asks", [True, False])
def test_a_stopped_process(asks: bool) -> None:
    receive, send = FORK.Pipe(duplex=False)
    started = FORK.Process(target=parent, args=(asks, send))
    started.start()
    assert receive.poll(20)
    pid = receive.recv()
    try:
        os.kill(pid, signal.SIGSTOP)
        started.kill()
        started.join()
        deadline = time.monotonic() + (10 if asks else 0.5)
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_alive(pid) is not asks
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
