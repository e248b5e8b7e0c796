"""Real SGLang engines for tests: what they are asked, what they answered, what their ranks did, and who judges them.

    outcomes = launch(folder, {"dense": engine("qwen3_5", [mixed()])})
    outcomes["dense"].check()

`check` compares with transformers in float32 (oracle_worker.py). In float32 every token must be the oracle's. On a GPU,
in bfloat16, judgement.py says what rounding may change.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sglang.environment import HERE, environment, gpus, options, share_a_gpu
from tests.sglang.judgement import Verdict, check_exact, check_rounded

Tokens = tuple[int, ...]
Request = dict[str, Any]
Wave = list[Request]

#: For all engines of a launch, and for the oracle.
SECONDS = 330.0 if gpus() else 560.0
#: Engines of one launch that run at the same time.
AT_ONCE = (os.cpu_count() or 2) // 2 if gpus() else 2
#: When the answer to a prompt that was sent at once is on its way: seconds.
LATER = 0.05 if gpus() else 0.4
#: SGLang derives ports from an engine's own, the furthest under data-parallel attention.
PORTS = 300


def prompt(length: int, seed: int = 1) -> Tokens:
    """Random byte tokens."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


def request(tokens: Sequence[int], new: int = 8, at: float = 0.0, rank: int | None = None) -> Request:
    """A prompt, the tokens to generate, when to send it in its wave, and the data-parallel rank to answer it."""
    return {"prompt": list(tokens), "new": new, "at": at, "rank": rank}


def chat() -> list[Wave]:
    """Three turns, each after all that was said before it."""
    return [[request(prompt(90, 3))], *([{**request(prompt(11, seed)), "goes_on": True}] for seed in (5, 6))]


@dataclass(frozen=True)
class Engine:
    """The plan of one engine.

    Attributes:
        cache: what its KV cache rounds to, a name of sparse_oracle.CACHES; empty but for models with sparse attention.
        plain: of a quantised checkpoint, the folder of the same weights in float32.
    """

    model: Path
    waves: list[Wave]
    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict[str, str])
    cache: str = ""
    plain: Path | None = None

    @property
    def oracle(self) -> str:
        """By what oracle_worker.py knows it."""
        return f"{self.plain or self.model}#{self.cache}"


def engine(
    name: str | Path, waves: list[Wave], env: dict[str, str] | None = None, cache: str = "", **more: Any
) -> Engine:
    """An engine for a checkpoint of tools/checkpoints.py, or a folder; `more` are options of sglang.Engine.

    NAME+FORMAT is a quantised one.
    """
    from checkpoints import checkpoint
    from quantised import quantised

    plain: Path | None = None
    if isinstance(name, Path):
        path = name
    elif "+" in name:
        path, plain = quantised(*name.split("+"))
    else:
        path = checkpoint(name)
    sharing = {"SGLANG_RANKS_ON_ONE_GPU": "1"} if share_a_gpu(more) else {}
    return Engine(path, waves, options(model_path=str(path), **more), {**sharing, **(env or {})}, cache, plain)


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
    verdicts: list[list[Verdict]] = field(default_factory=list[list[Verdict]])

    @property
    def tokens(self) -> list[list[list[int]]]:
        return [[answer["tokens"] for answer in wave] for wave in self.answers]

    def check(self) -> int:
        """Compare every request with the oracle; returns how many."""
        pairs = [pair for waves in zip(self.verdicts, self.answers, strict=True) for pair in zip(*waves, strict=True)]
        if gpus():
            check_rounded(pairs)
        else:
            check_exact(pairs, self.plan.cache)
        return len(pairs)


class Outcomes(Mapping[str, Outcome]):
    """By the engine's key. One that failed says so when it is asked for, and leaves the others alone."""

    def __init__(self, ended: dict[str, Outcome | AssertionError]) -> None:
        self._ended = ended

    def __getitem__(self, key: str) -> Outcome:
        found = self._ended[key]
        if isinstance(found, AssertionError):
            raise found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._ended)

    def __len__(self) -> int:
        return len(self._ended)


def launch(folder: Path, engines: dict[str, Engine]) -> Outcomes:
    """Run the engines, some at once, and have the oracle judge them.

    Raises:
        AssertionError: the oracle did not end well; with the end of its log. An engine's is raised by `Outcomes`.
    """
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        run = {key: pool.submit(_run, folder / key.replace(" ", "_"), plan, end) for key, plan in engines.items()}
        ended = {key: _ended(future) for key, future in run.items()}
    judge(folder, [one for one in ended.values() if isinstance(one, Outcome)])
    return Outcomes(ended)


def asked_for(tests: pytest.FixtureRequest) -> set[str]:
    """The engines (`key`) that the tests of the fixture's module need, of those tests that are to run."""
    items: list[Any] = [item for item in tests.session.items if item.path == tests.path]
    skipped = [any(mark.args[0] for mark in item.iter_markers("skipif")) for item in items]
    named = [item for item, skip in zip(items, skipped, strict=True) if not skip and hasattr(item, "callspec")]
    return {item.callspec.params["key"] for item in named if "key" in item.callspec.params}


def _ended(future: Future[Outcome]) -> Outcome | AssertionError:
    try:
        return future.result()
    except AssertionError as error:
        return error


def judge(folder: Path, outcomes: list[Outcome]) -> None:
    """Fill in the oracle's verdicts."""
    asked: dict[str, list[Any]] = {}
    for one in outcomes:
        for sent, got in zip(one.plan.waves, one.answers, strict=True):
            assert len(sent) == len(got)
            asked.setdefault(one.plan.oracle, []).extend([answer["prompt"], answer["tokens"]] for answer in got)
    env = environment(CUDA_VISIBLE_DEVICES="", PYTHONPATH="")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        plans = [{"asked": {key: pairs}, "rounded": bool(gpus())} for key, pairs in asked.items()]
        runs = [
            pool.submit(_process, folder / f"oracle-{number}", "oracle_worker.py", plan, env)
            for number, plan in enumerate(plans)
        ]
        said = {key: verdicts for run in runs for key, verdicts in run.result().items()}
    given = {key: iter(verdicts) for key, verdicts in said.items()}
    for one in outcomes:
        one.verdicts = [[next(given[one.plan.oracle]) for _ in wave] for wave in one.plan.waves]


def _run(folder: Path, plan: Engine, end: float) -> Outcome:
    steps = folder / "steps"
    steps.mkdir(parents=True)
    env = environment(SGLANG_STEPS=str(steps), ATOM_PATCHES_STATE_DIR=str(folder / "states"), **plan.env)
    with reserved_ports() as first:
        ports = {"port": first, "nccl_port": first + PORTS - 2}
        asked = {"options": {**ports, **plan.options}, "waves": plan.waves}
        result = _process(folder, "engine_worker.py", asked, env, end - time.monotonic())
    return Outcome(plan, result, read_steps(steps))


def read_steps(folder: Path) -> list[Steps]:
    """By rank, what tests/sglang/cpu_site/sglang_steps.py wrote."""
    found: list[Steps] = []
    for file in folder.glob("*.jsonl"):
        first, *steps = map(json.loads, file.read_text().splitlines())
        found.append(Steps(first["rank"], first["model"], first["modules"], steps))
    return sorted(found, key=lambda one: one.rank)


def _process(folder: Path, script: str, plan: Any, env: dict[str, str], seconds: float = SECONDS) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    name = script.removesuffix(".py")
    plan_file, result, log = (folder / f"{name}.{end}" for end in ("plan.json", "result.json", "log"))
    plan_file.write_text(json.dumps(plan))
    command = [sys.executable, str(HERE / script), str(plan_file), str(result)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            code = "none: out of time"
        finally:
            _end(process)
    text = log.read_text(errors="replace")[-6000:]
    assert result.exists(), f"{script} gave no result, exit status {code}\n{text}"
    return json.loads(result.read_text())


def free_ports() -> int:
    """A port that is free now, like those behind it that SGLang derives from it."""
    with reserved_ports() as first:
        return first


@contextlib.contextmanager
def reserved_ports() -> Iterator[int]:
    """The same, and nobody else who asks here, in this process or another, gets one of them within the block."""
    while True:
        first = random.SystemRandom().randrange(20_000, 31_000, PORTS)
        with contextlib.ExitStack() as kept:
            try:
                for port in range(first, first + PORTS - 1):
                    with socket.socket() as one:
                        one.bind(("127.0.0.1", port))
                kept.enter_context(socket.socket()).bind(("127.0.0.1", first + PORTS - 1))
            except OSError:
                continue
            yield first
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process and of its group, of its own as it was started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def mixed() -> Wave:
    """More prompts than run at once: one token, shorter than the convolution, odd lengths, more than a chunk."""
    return [request(prompt(length)) for length in (1, 5, 37, 150, 2, 64, 90, 3)]
