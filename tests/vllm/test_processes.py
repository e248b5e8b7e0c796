"""Whichever way the overlay is armed, `status` sees every process of a running engine; unarmed, it sees none.

Each way starts one engine, and all assertions read the one status that was taken while it ran.
"""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools import startup

START_SECONDS = 180.0

OFFLINE = """
import sys

def main():  # a spawned child imports this module, but does not run this function
    {main_starts_with}
    from vllm import LLM, SamplingParams
    llm = LLM(model={model!r}, enforce_eager=True, max_model_len=256, max_num_seqs=2, dtype="float32")
    wanted = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
    out = llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], wanted)
    assert len(out[0].outputs[0].token_ids) == 2
    print("READY", flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Way:
    """One way of arming: what it runs and which processes it has."""

    name: str
    environment: dict[str, str]
    roles: tuple[tuple[str, ...], ...]
    main_starts_with: str = "pass"
    serves: bool = False


OF_ONE_RANK = (("api server",), ("engine core",), ("worker",))

WAYS = (
    Way(
        "VLLM_PLUGINS=atom",
        {"VLLM_PLUGINS": "atom"},
        (*OF_ONE_RANK, ("worker",)),
        serves=True,
    ),
    Way("ATOM_PATCHES=1", {"ATOM_PATCHES": "1"}, OF_ONE_RANK),
    Way("import atom_patches", {}, OF_ONE_RANK, main_starts_with="import atom_patches"),
    Way("nothing", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, ()),
)


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


def environment(state: Path, way: Way) -> dict[str, str]:
    # tools/mutants.py puts a changed copy of the package before the installed one.
    path = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    return startup.environment(
        **path,
        ATOM_PATCHES_STATE_DIR=str(state),
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0|1" if way.serves else "0",
        VLLM_NO_USAGE_STATS="1",
        **way.environment,
    )


def atom_patches(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atom_patches", *arguments],
        env=startup.environment(ATOM_PATCHES_STATE_DIR=str(state)),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> str:
    """A tiny dense checkpoint."""
    return str(checkpoint("qwen3"))


@contextlib.contextmanager
def offline(way: Way, model: str, state: Path, folder: Path) -> Iterator[int]:
    """An engine in a script, ready and waiting."""
    script = folder / "script.py"
    script.write_text(OFFLINE.format(model=model, main_starts_with=way.main_starts_with))
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(state, way),
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
            process.wait(60)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def server(way: Way, model: str, state: Path, folder: Path) -> Iterator[int]:
    """The OpenAI-compatible server with two prefill-context-parallel workers, ready to answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "2"]
    command += ["--dtype", "float32", "--prefill-context-parallel-size", "2"]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment(state, way), cwd=folder, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
                time.sleep(0.5)
            yield process.pid
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way.name)
def running(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Running:
    way: Way = request.param
    folder = tmp_path_factory.mktemp("way")
    state = folder / "state"
    start = server if way.serves else offline
    with start(way, model, state, folder) as pid:
        status = json.loads(atom_patches(state, "status", "--json").stdout)
        text = atom_patches(state, "status").stdout
        doctor = atom_patches(state, "doctor")
    _wait_until_gone([process["pid"] for process in status["processes"]])
    afterwards = json.loads(atom_patches(state, "status", "--json").stdout)
    files = sorted(os.listdir(state))
    return Running(way, pid, status, text, doctor, afterwards, files)


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)


def test_every_process_is_seen_with_its_role(running: Running) -> None:
    found = sorted(tuple(process["roles"]) for process in running.status["processes"])
    assert found == sorted(running.way.roles)


def test_the_process_that_was_started_is_the_api_server(running: Running) -> None:
    servers = [process["pid"] for process in running.status["processes"] if "api server" in process["roles"]]
    assert servers == ([running.pid] if running.way.roles else [])


def test_each_process_names_itself_its_engine_and_its_options(running: Running) -> None:
    size = "2" if running.way.serves else "1"
    for process in running.status["processes"]:
        assert (process["engine"], process["version"]) == ("vllm", running.status["engines"][0]["version"])
        assert process["config"]["prefill_context_parallel_size"] == size
        if "engine core" in process["roles"]:
            assert "EngineCore" in process["title"]
        elif "worker" in process["roles"]:
            assert "Worker" in process["title"]


def test_each_process_has_a_state_and_a_reason_for_every_patch_of_its_engine(running: Running) -> None:
    declared = [patch["id"] for patch in running.status["patches"] if patch["engine"] == "vllm"]
    for process in running.status["processes"]:
        assert [patch["id"] for patch in process["patches"]] == declared
        assert all(patch["state"] and patch["reason"] for patch in process["patches"])


def test_a_feature_is_applied_where_it_is_needed_and_nowhere_else(running: Running) -> None:
    """`block_table` belongs to the workers; `kv_cache_manager` to the engine core, which has the scheduler."""
    for process in running.status["processes"]:
        states = {patch["id"]: patch["state"] for patch in process["patches"]}
        if not running.way.serves:
            assert states["vllm.pcp.block_table"] == "inactive"
        elif "worker" in process["roles"]:
            assert states["vllm.pcp.block_table"] == "applied"
        elif "engine core" in process["roles"]:
            assert states["vllm.pcp.kv_cache_manager"] == "applied"


def test_the_text_form_names_every_process(running: Running) -> None:
    for process in running.status["processes"]:
        assert f"{process['pid']}  {', '.join(process['roles'])}" in running.text
    if not running.way.roles:
        assert "none that was handed an engine's configuration" in running.text


def test_doctor_is_content(running: Running) -> None:
    assert (running.doctor.returncode, running.doctor.stderr) == (0, "")
    assert running.doctor.stdout.endswith("doctor: no problems\n")


def test_no_process_holds_on_to_an_original(running: Running) -> None:
    notes = [note for process in running.status["processes"] for note in process["notes"]]
    assert [note for note in notes if "still held by" in note] == []


def test_nothing_is_left_after_the_engine_has_stopped(running: Running) -> None:
    assert running.status_afterwards["processes"] == []
    assert running.files_afterwards == []
