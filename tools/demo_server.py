"""A vLLM server on this machine's CPU for as long as a `with` block, OpenAI-compatible, with a probe in its workers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atom_patches.bench import server
from atom_patches.bench.server import ServerError, free_port, running

__all__ = ["Server", "ServerError", "free_port", "running", "serve"]


class Server(server.Server):
    """A server that also says what its workers and its counters saw."""

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
    with running(name, command, port, _environment(plugins, pcp, states), folder) as started:
        yield Server(**vars(started))
