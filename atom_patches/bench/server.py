"""A server's process for as long as a `with` block: started in a group of its own, waited for, and ended with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 240.0
STOP_S = 30.0
LOG_LINES = 40

HERE = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine, whatever proxy there is for others."""


class ServerError(RuntimeError):
    """The server did not start, or ended by itself; the message ends with its log's last lines."""


@dataclass(frozen=True)
class Server:
    """A server that answers, or will answer, at `url`."""

    name: str
    url: str
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]

    def wait(self, meanwhile: Callable[[], None], limit: float = START_S) -> None:
        """Return when the server answers; `meanwhile` is called until then, soon about once a second.

        Raises:
            ServerError: it does not answer within `limit` seconds, or ends.
        """
        deadline, pause = time.monotonic() + limit, 0.1
        while not _healthy(self.url):
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(f"the server {self.name} did not answer in {limit:.0f} s:\n{_tail(self.log)}")
            meanwhile()
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)

    def check(self) -> None:
        """Raises:
        ServerError: the server has ended.
        """
        if (code := self.process.poll()) is not None:
            raise ServerError(f"the server {self.name} ended with status {code}:\n{_tail(self.log)}")

    def status(self) -> dict[str, Any]:
        """What `python -m atom_patches status --json` says about this server's processes."""
        done = subprocess.run(
            [sys.executable, "-m", "atom_patches", "status", "--json"],
            env=self.environment, capture_output=True, text=True, check=True, timeout=START_S,
        )  # fmt: skip
        return json.loads(done.stdout)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    """Whether a server can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
        return True


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str], folder: Path
) -> Iterator[Server]:
    """Start a server's process, whose log goes to `folder`, and end it with the block."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield Server(name, f"http://127.0.0.1:{port}", log, environment, process)
    finally:
        _stop(process)


def _healthy(url: str) -> bool:
    try:
        with HERE.open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, and whatever it left of its own process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
