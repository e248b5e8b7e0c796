"""A server on this machine's CPU for as long as a `with` block: vLLM's, OpenAI-compatible, or another one's process."""

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

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Return when the server answers; `meanwhile` is called about once a second until then.

        Raises:
            ServerError: it does not answer in time, or ends.
        """
        deadline = time.monotonic() + START_S
        while not _healthy(self.url):
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(f"the server {self.name} did not answer in {START_S:.0f} s:\n{_tail(self.log)}")
            meanwhile()
            time.sleep(1.0)

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

    def workers(self, method: str) -> list[Any]:
        """What a method of `row_probe` gives on every worker, by rank."""
        asked = urllib.request.Request(
            f"{self.url}/collective_rpc",
            data=json.dumps({"method": method}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())["results"]

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def _environment(plugins: str, ranks: int, states: Path) -> dict[str, str]:
    """The caller's environment without what would steer either engine or overlay."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATOM_", "VLLM_", "SGLANG_"))}
    cores = sorted(os.sched_getaffinity(0))
    return kept | {
        "VLLM_PLUGINS": plugins,
        # Offers /collective_rpc, through which the workers are asked for the rows that their modules saw.
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": str(Path(__file__).parent),
        "ATOM_PATCHES_STATE_DIR": str(states),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
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


@contextlib.contextmanager
def serve(
    model: Path, name: str, plugins: str, pcp: int, options: tuple[str, ...], folder: Path, dtype: str = "float32"
) -> Iterator[Server]:
    """Start a vLLM server, whose log and state files go to `folder`, and end it with the block."""
    states = folder / f"{name}.states"
    states.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model), "--served-model-name", "demo", "--dtype", dtype, "--enforce-eager", *options]
    command += ["--worker-extension-cls", "row_probe.RowProbe"]
    if pcp > 1:
        command += ["--prefill-context-parallel-size", str(pcp)]
    with running(name, command, port, _environment(plugins, pcp, states), folder) as server:
        yield server
