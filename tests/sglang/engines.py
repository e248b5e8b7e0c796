"""Real SGLang engines for tests: what they are asked, what they answered, what their ranks did, and who judges them.

    outcomes = launch(folder, {"dense": engine("qwen3_5", [mixed()])})
    outcomes["dense"].check()

`check` compares with transformers in float32 (oracle_worker.py). In float32 every token must be the oracle's; on a GPU,
in bfloat16, a token may be another one where two are as good, so there the log-probability of each token that was
generated is compared, after the same tokens: a fault of a state, a cache or a collective moves it by far more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.sglang.environment import HERE, environment, gpus, options

Tokens = tuple[int, ...]
Request = dict[str, Any]
Wave = list[Request]

#: In float32 log-probabilities of an engine and the oracle differ by no more; the oracle's tokens win by twice that.
CLOSE = 1.5e-4
#: In bfloat16: at most, and on average.
WORST, MEAN = 0.25, 0.03
SECONDS = 500.0
PORTS = 20


def prompt(length: int, seed: int = 1) -> Tokens:
    """Random byte tokens."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


def request(tokens: Sequence[int], new: int = 8, at: float = 0.0, rank: int | None = None) -> Request:
    """A prompt, the tokens to generate, when to send it in its wave, and the data-parallel rank to answer it."""
    return {"prompt": list(tokens), "new": new, "at": at, "rank": rank}


@dataclass(frozen=True)
class Engine:
    """The plan of one engine."""

    model: Path
    waves: list[Wave]
    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict[str, str])


def engine(name: str | Path, waves: list[Wave], env: dict[str, str] | None = None, **more: Any) -> Engine:
    """An engine for a checkpoint of tools/checkpoints.py, or a folder; `more` are options of sglang.Engine."""
    from checkpoints import checkpoint

    path = name if isinstance(name, Path) else checkpoint(name)
    return Engine(path, waves, options(model_path=str(path), **more), env or {})


@dataclass(frozen=True)
class Steps:
    """What the model runner of one rank ran."""

    rank: int
    model: str
    modules: dict[str, int]
    steps: list[dict[str, Any]]

    @property
    def modes(self) -> set[str]:
        return {step["mode"] for step in self.steps}


@dataclass
class Outcome:
    """What one engine answered, and what its ranks did."""

    plan: Engine
    answers: list[list[dict[str, Any]]]
    ranks: list[Steps]
    verdicts: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])

    @property
    def tokens(self) -> list[list[list[int]]]:
        return [[answer["tokens"] for answer in wave] for wave in self.answers]

    def check(self) -> int:
        """Compare every request with the oracle; returns how many."""
        return check(self.verdicts, self.answers, exact=not gpus())


def check(verdicts: list[list[dict[str, Any]]], answers: list[list[dict[str, Any]]], exact: bool) -> int:
    distances: list[float] = []
    pairs = [pair for waves in zip(verdicts, answers, strict=True) for pair in zip(*waves, strict=True)]
    for verdict, answer in pairs:
        if exact:
            assert verdict["margin"] > 2 * CLOSE, f"a prompt has two best continuations: {verdict}"
            assert answer["tokens"] == verdict["greedy"]
        distances += [abs(a - b) for a, b in zip(answer["logprobs"], verdict["logprobs"], strict=True)]
    worst, mean = max(distances), sum(distances) / len(distances)
    assert worst < (CLOSE if exact else WORST), f"log-probabilities differ by {worst}, {mean} on average"
    assert exact or mean < MEAN, f"log-probabilities differ by {mean} on average"
    return len(pairs)


def launch(folder: Path, engines: dict[str, Engine], at_once: int = 2) -> dict[str, Outcome]:
    """Run the engines, some at once, and have the oracle judge them.

    Raises:
        AssertionError: an engine, or the oracle, did not end well; with the end of its log.
    """
    with ThreadPoolExecutor(at_once) as pool:
        run = {key: pool.submit(_run, folder / key.replace(" ", "_"), plan) for key, plan in engines.items()}
        outcomes = {key: future.result() for key, future in run.items()}
    judge(folder, list(outcomes.values()))
    return outcomes


def judge(folder: Path, outcomes: list[Outcome]) -> None:
    """Fill in the oracle's verdicts."""
    asked: dict[str, list[Any]] = {}
    for one in outcomes:
        for sent, got in zip(one.plan.waves, one.answers, strict=True):
            pairs = [[a["prompt"], b["tokens"]] for a, b in zip(sent, got, strict=True)]
            asked.setdefault(str(one.plan.model), []).extend(pairs)
    said = _process(folder, "oracle_worker.py", asked, environment(CUDA_VISIBLE_DEVICES="", PYTHONPATH=""))
    given = {path: iter(verdicts) for path, verdicts in said.items()}
    for one in outcomes:
        one.verdicts = [[next(given[str(one.plan.model)]) for _ in wave] for wave in one.plan.waves]


def _run(folder: Path, plan: Engine) -> Outcome:
    steps = folder / "steps"
    steps.mkdir(parents=True)
    env = environment(SGLANG_STEPS=str(steps), ATOM_PATCHES_STATE_DIR=str(folder / "states"), **plan.env)
    first = free_ports()
    ports = {"port": first, "nccl_port": first + PORTS - 1}
    asked = {"options": {**ports, **plan.options}, "waves": plan.waves}
    return Outcome(plan, _process(folder, "engine_worker.py", asked, env), read_steps(steps))


def read_steps(folder: Path) -> list[Steps]:
    """By rank, what tests/sglang/cpu_site/sglang_steps.py wrote."""
    found: list[Steps] = []
    for file in folder.glob("*.jsonl"):
        first, *steps = map(json.loads, file.read_text().splitlines())
        found.append(Steps(first["rank"], first["model"], first["modules"], steps))
    return sorted(found, key=lambda one: one.rank)


def _process(folder: Path, script: str, plan: Any, env: dict[str, str]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    name = script.removesuffix(".py")
    plan_file, result, log = (folder / f"{name}.{end}" for end in ("plan.json", "result.json", "log"))
    plan_file.write_text(json.dumps(plan))
    command = [sys.executable, str(HERE / script), str(plan_file), str(result)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = "none: out of time"
        finally:
            _end(process)
    text = log.read_text(errors="replace")[-6000:]
    assert result.exists(), f"{script} gave no result, exit status {code}\n{text}"
    return json.loads(result.read_text())


def free_ports() -> int:
    """A port that is free now, like those behind it that SGLang derives from it."""
    while True:
        first = random.SystemRandom().randrange(20_000, 31_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + PORTS):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process and of its group, of its own as it was started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def mixed() -> Wave:
    """More prompts than run at once: one token, shorter than the convolution, odd lengths, more than a chunk."""
    return [request(prompt(length)) for length in (1, 5, 37, 150, 2, 64, 90, 3)]
