"""Ray starts the ranks, on two nodes whose environment knows nothing of the overlay.

Both nodes are on this machine, and what Ray takes for their GPUs are processes on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.gdn_oracle import HERE, environment, free_port, run_engines
from tests.vllm.launches import launch
from tests.vllm.pcp_engines import PATH, check_greedy, engine
from tests.vllm.pcp_waves import GREEDY, SHORTEST

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not installed: pip install ray")

RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ON_CPU": "1",
    "PYTHONPATH": ":".join([str(HERE / "ray_site"), PATH, os.environ.get("PYTHONPATH", "")]),
}


def ray_environment(**more: str) -> dict[str, str]:
    """This process's environment without the overlay's and vLLM's variables, and what else is given."""
    names = ("ATOM_", "VLLM_")
    return {name: value for name, value in environment(**RAY).items() if not name.startswith(names)} | more


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Two nodes of one device each, and the port of the first."""
    port = free_port()
    # Ray's sockets have to have short names.
    session = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", "--num-gpus", "1"]
    start += ["--object-store-memory", str(100 * 2**20)]
    first = [*start, "--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", session]
    second = [*start, "--address", f"127.0.0.1:{port}"]
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "first").mkdir()
    (folder / "second").mkdir()
    try:
        with launch(folder / "first", [first], [ray_environment()]) as head:
            head.wait_for(lambda: "Ray runtime started" in head.text(), 60)
            with launch(folder / "second", [second], [ray_environment()]) as other:
                other.wait_for(lambda: "Ray runtime started" in other.text(), 60)
                yield port
    finally:
        shutil.rmtree(session, ignore_errors=True)


@pytest.fixture(scope="module")
def served(cluster: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine of two ranks on two nodes gave."""
    plan = engine("qwen3_next", GREEDY, probe=True, distributed_executor_backend="ray", prefill_context_parallel_size=2)
    env = environment(
        ATOM_PCP_MIN_ROWS="1", ATOM_PCP_GDN="relay", VLLM_USE_RAY_V2_EXECUTOR_BACKEND="1",
        RAY_ADDRESS=f"127.0.0.1:{cluster}", **RAY,
    )  # fmt: skip
    [[result]] = run_engines(tmp_path_factory.mktemp("ray"), [[plan]], [env], "traffic.py", 300)
    return result


def test_ranks_on_two_nodes_equal_the_oracle(served: dict[str, Any]) -> None:
    for sent, got in zip(GREEDY, served["waves"], strict=True):
        assert check_greedy("qwen3_next", sent, got) > 0
    assert served["free_after"] == served["free_before"]
    assert served["patches"]["vllm.pcp.ray_environment"] == "applied"


def test_each_node_is_set_as_the_driver_is(served: dict[str, Any]) -> None:
    """Prompts of 1, 2 and 40 tokens: by a node's own settings such a step is not split."""
    assert [worker[0]["projections"] for worker in served["rows"][GREEDY.index(SHORTEST)]] == [[1 + 21], [1 + 21]]
