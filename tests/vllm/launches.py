"""Processes as a user starts them, watched while they run and until nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.vllm.gdn_oracle import environment
from tests.vllm.pcp_engines import PATH


@dataclass
class Launch:
    """Processes that were started, and what they have written so far."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]
    family: list[int] = field(default_factory=list)

    def meet_family(self) -> list[int]:
        """Remember the processes that the started ones have started, and return them."""
        self.family = [pid for process in self.processes for pid in descendants(process.pid)]
        return self.family

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def wait_for(self, happened: Callable[[], bool], seconds: float) -> None:
        """Wait until something happened; a process that ends before is shown."""
        deadline = time.monotonic() + seconds
        while not happened():
            ended = [process.poll() for process in self.processes]
            if any(code is not None for code in ended) or time.monotonic() > deadline:
                pytest.fail(f"exit codes {ended}\n{self.text()[-6000:]}")
            time.sleep(0.1)

    def ended(self, seconds: float) -> bool:
        """Whether all processes, and those that they had started, are gone within the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(p.poll() is not None for p in self.processes) and not any(map(is_alive, self.family)):
                return True
            time.sleep(0.1)
        return False


@contextlib.contextmanager
def launch(folder: Path, commands: list[list[str]], envs: list[dict[str, str]]) -> Iterator[Launch]:
    """Start the commands, and leave nothing of them behind."""
    logs = [folder / f"log{index}.txt" for index in range(len(commands))]
    with contextlib.ExitStack() as open_files:
        outputs = [open_files.enter_context(log.open("w")) for log in logs]
        processes = [
            subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
            for command, env, output in zip(commands, envs, outputs, strict=True)
        ]
    running = Launch(processes, logs)
    try:
        yield running
    finally:
        left = {*running.family, *running.meet_family()}
        for process in processes:
            process.kill()
            process.wait()
        for pid in filter(is_alive, left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def stat_of(pid: int) -> list[str] | None:
    """State, parent and so on of a process; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended; one that nobody waits for has."""
    stat = stat_of(pid)
    return stat is not None and stat[0] not in "ZX"


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    everyone = {int(entry.name): stat_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    children = [one for one, stat in everyone.items() if stat is not None and int(stat[1]) == pid]
    return children + [found for child in children for found in descendants(child)]


def workers_environment(**more: str) -> dict[str, str]:
    """For an engine with processes of its own, as a user has it."""
    binding = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": PATH}
    return environment(**{"ATOM_PCP_MIN_ROWS": "1", **binding, **more})


def server_command(model: str, port: int, *options: str) -> list[str]:
    """The OpenAI-compatible server on two prefill-context-parallel ranks."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "512", "--dtype", "float32"]
    return [*command, "--prefill-context-parallel-size", "2", *options]
