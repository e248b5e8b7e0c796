"""A rank that dies, or hangs, takes everything with it in bounded time, and the log says why."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import START_SECONDS, is_healthy
from tests.vllm.gdn_oracle import HERE, environment, free_port, prompt
from tests.vllm.launches import launch, server_command, workers_environment
from tests.vllm.pcp_engines import PATH, engine, request
from tests.vllm.short_timeouts import SECONDS

#: From a death until everything has ended: mostly what vLLM grants its workers to end by themselves, twice over, as
#: other tests may keep the machine busy.
END_SECONDS = 60.0


def worker(pids: list[int], rank: int) -> int:
    """The worker process of one prefill-context-parallel rank."""
    [found] = [pid for pid in pids if f"Worker_PCP{rank}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> str:
    return str(checkpoint("qwen3"))


@pytest.mark.parametrize(
    ("fault", "env", "cause"),
    [
        (signal.SIGKILL, {}, "Worker proc VllmWorker-0 died unexpectedly"),
        (signal.SIGSTOP, {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "5"}, "timed out"),
    ],
    ids=["dies", "hangs"],
)
def test_a_worker_of_a_script(
    tmp_path: Path, model: str, fault: signal.Signals, env: dict[str, str], cause: str
) -> None:
    """The rank whose output the engine takes, while both exchange rows."""
    command = [sys.executable, str(HERE / "endless_engine.py"), model]
    with launch(tmp_path, [command], [workers_environment(**env)]) as running:
        running.wait_for(lambda: "answered" in running.text(), START_SECONDS)
        os.kill(worker(running.meet_family(), 0), fault)
        assert running.ended(END_SECONDS), running.text()[-4000:]
        assert running.processes[0].returncode != 0
        assert "EngineDeadError" in running.text()
        assert cause in running.text(), running.text()[-4000:]


def post(port: int, model: str) -> int:
    """The status of one long request."""
    body = {"model": model, "prompt": list(range(1, 150)), "max_tokens": 300, "ignore_eos": True}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError):
        return 0


def test_a_worker_of_a_server_dies(tmp_path: Path, model: str) -> None:
    """The request that is being answered fails, and the server ends."""
    port = free_port()
    command = server_command(model, port, "--max-num-seqs", "2")
    with launch(tmp_path, [command], [workers_environment(ATOM_PCP_DEBUG="1")]) as running:
        running.wait_for(lambda: is_healthy(port), START_SECONDS)
        statuses: list[int] = []
        asking = threading.Thread(target=lambda: statuses.append(post(port, model)))
        asking.start()
        running.wait_for(lambda: "split: rank 1" in running.text(), 60)
        os.kill(worker(running.meet_family(), 1), signal.SIGKILL)
        assert running.ended(END_SECONDS), running.text()[-4000:]
        asking.join(END_SECONDS)
        assert statuses and statuses[0] != 200
        assert "died unexpectedly" in running.text()


@pytest.mark.parametrize(
    ("fault", "cause"),
    # Whether a rank that dies closes the connection or resets it hangs on what was under way.
    [(signal.SIGKILL, r"Connection (closed|reset) by peer"), (signal.SIGSTOP, "Timed out waiting")],
    ids=["dies", "hangs"],
)
def test_a_rank_of_an_external_launcher(tmp_path: Path, fault: signal.Signals, cause: str) -> None:
    """Its peer ends with an error; the launcher then ends what hangs."""
    plan = engine(
        "qwen3",
        [[request(prompt(100, seed=1), max_tokens=400) for _ in range(16)]],
        setup="tests.vllm.short_timeouts",
        distributed_executor_backend="external_launcher",
        prefill_context_parallel_size=2,
    )
    (tmp_path / "plan.json").write_text(json.dumps([plan]))
    command = [sys.executable, str(HERE / "traffic.py"), "plan.json", "result.json"]
    port = str(free_port())
    envs = [
        environment(
            PYTHONPATH=PATH, ATOM_PCP_MIN_ROWS="1", ATOM_PCP_DEBUG="1", RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(2)
    ]  # fmt: skip
    with launch(tmp_path, [command] * 2, envs) as running:
        running.wait_for(lambda: "split: rank 1" in running.text(), START_SECONDS)
        stays, faulty = running.processes
        os.kill(faulty.pid, fault)
        stays.wait(END_SECONDS + SECONDS)
        assert stays.returncode != 0
        assert re.search(cause, running.logs[0].read_text())
