"""What the serving examples share: start a server, show how, ask it, and say what its processes were patched with."""

from __future__ import annotations

import json
import os
import shlex
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from atom_patches.bench.server import Server, free_port, running  # noqa: E402

LOGS = ROOT / "build" / "examples"


def on_gpu() -> bool:
    """Whether torch finds a GPU here; the small models of these examples run without one, too."""
    import torch

    return torch.cuda.is_available()


def vllm_settings(ranks: int) -> dict[str, str]:
    """What vLLM's CPU platform wants to know, where there is no GPU: a core for each rank."""
    if on_gpu():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


@contextmanager
def server(
    name: str, command: Sequence[str], asked: Mapping[str, str], environment: Mapping[str, str]
) -> Iterator[Server]:
    """A server of this command for as long as the block, once it answers.

    Args:
        name: of its log in build/examples.
        command: what you would type, without the port.
        asked: the variables that matter, to be shown.
        environment: all others.
    """
    print(" ".join([*(f"{variable}={value}" for variable, value in asked.items()), shlex.join(command)]), flush=True)
    states = LOGS / f"{name}.states"
    states.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = free_port()
    whole = [sys.executable if command[0] == "python" else command[0], *command[1:], "--port", str(port)]
    variables = {**environment, **asked, "ATOM_PATCHES_STATE_DIR": str(states)}
    with running(name, whole, port, variables, LOGS) as started:
        started.wait(lambda: None)
        yield started


def inherited() -> dict[str, str]:
    """This process's environment, without what would steer engine or overlay."""
    return {name: one for name, one in os.environ.items() if not name.startswith(("ATOM_", "VLLM_", "SGLANG_"))}


def post(started: Server, path: str, **body: Any) -> Any:
    """The JSON with which the server answers."""
    asked = urllib.request.Request(
        started.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=300) as answer:
        return json.loads(answer.read())


def metric(started: Server, name: str, **labels: str) -> int:
    """A metric of the server's /metrics, added up over all lines with these labels."""
    with urllib.request.urlopen(f"{started.url}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(f"{name}{{")]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(one in line for one in wanted)))


def prompt(length: int) -> list[int]:
    """Token ids that stand for text."""
    return [97 + (7 * place + place // 13) % 26 for place in range(length)]


def show_processes(started: Server, group: str) -> None:
    """Each process of the server, and how many patches of a group are in place there."""
    for process in started.status()["processes"]:
        mine = [patch for patch in process["patches"] if patch["id"].startswith(f"{group}.")]
        applied = sum(patch["state"] == "applied" for patch in mine)
        print(f"{' and '.join(process['roles'])}: {applied} patches of {group} in place")
