"""Engines as a user starts them, in a script or as a server, and what `status` and `doctor` say while they run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import installed

START_SECONDS = 300.0
SETTLE_SECONDS = 60.0

Roles = tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """One way of arming.

    Args:
        name: what arms.
        roles: of each process that the engine has.
        environment: variables to set.
        checkpoint: of tools/checkpoints.py.
        options: of the engine.
        main_starts_with: a script's first statement.
        serves: started as a server, not by a script.
    """

    name: str
    roles: tuple[Roles, ...]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    checkpoint: str = "qwen3"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    main_starts_with: str = "pass"
    serves: bool = False


@dataclass(frozen=True)
class Running:
    """What was seen of an engine: while it ran, and after it had been stopped."""

    way: Way
    pid: int
    status: dict[str, Any]
    text: str
    doctor: subprocess.CompletedProcess[str]
    status_afterwards: dict[str, Any]
    files_afterwards: list[str]

    @property
    def processes(self) -> list[dict[str, Any]]:
        return self.status["processes"]

    def pids(self, role: str) -> list[int]:
        return [process["pid"] for process in self.processes if role in process["roles"]]


def version(running: Running, engine: str) -> str:
    """The installed version of an engine, as `status` says."""
    [found] = [one["version"] for one in running.status["engines"] if one["name"] == engine]
    return found


def states(process: dict[str, Any]) -> dict[str, str]:
    """The states of a process's patches, by id."""
    return {patch["id"]: patch["state"] for patch in process["patches"]}


def check_every_patch(running: Running, engine: str) -> None:
    """Every process has a state and a reason for every patch of its engine, and for no other's."""
    declared = [patch["id"] for patch in running.status["patches"] if patch["engine"] == engine]
    for process in running.processes:
        assert list(states(process)) == declared
        assert all(patch["state"] and patch["reason"] for patch in process["patches"])


def watch(way: Way, started: contextlib.AbstractContextManager[int], state: Path, env: dict[str, str]) -> Running:
    """Ask `status` and `doctor` while an engine runs, then stop it and ask again.

    Args:
        way: which processes are expected.
        started: gives the pid of the running engine's first process.
        state: the folder of the state files.
        env: for the commands.
    """
    with started as pid:
        status = _settled_status(len(way.roles), env)
        text = atom_patches(env, "status").stdout
        doctor = atom_patches(env, "doctor")
    wait_until_gone([process["pid"] for process in status["processes"]])
    afterwards = json.loads(atom_patches(env, "status", "--json").stdout)
    return Running(way, pid, status, text, doctor, afterwards, sorted(os.listdir(state)))


def _settled_status(processes: int, env: dict[str, str]) -> dict[str, Any]:
    """The status once this many processes report: a server may answer before its last process is up."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        status = json.loads(atom_patches(env, "status", "--json").stdout)
        if len(status["processes"]) >= processes or time.monotonic() > deadline:
            return status
        time.sleep(1)


def atom_patches(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package, away from the checkout."""
    command = [sys.executable, "-m", "atom_patches", *arguments]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)


def environment(state: Path, **changes: str) -> dict[str, str]:
    """What an engine, or a command about it, is started with."""
    return installed.environment(ATOM_PATCHES_STATE_DIR=str(state), **changes)


@contextlib.contextmanager
def script(code: str, folder: Path, env: dict[str, str]) -> Iterator[int]:
    """A script that has printed READY, and ends when it has read a line."""
    file, log = folder / "script.py", folder / "log"
    file.write_text(code)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(file)],
            env=env,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            if not any("READY" in line for line in process.stdout):
                pytest.fail(f"the engine did not start:\n{log.read_text()[-4000:]}")
            yield process.pid
            process.stdin.write("\n")
            process.stdin.close()
            process.wait(SETTLE_SECONDS)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def server(command: list[str], port: int, folder: Path, env: dict[str, str], stop: bool = True) -> Iterator[int]:
    """A server that answers. It is asked to stop, unless it is one that would not; what is left of it is killed."""
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=output, stderr=output, start_new_session=True)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield process.pid
            if stop:
                process.send_signal(signal.SIGTERM)
                process.wait(SETTLE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
