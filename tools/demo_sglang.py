"""Serve hybrid models with SGLang stock and with the ATOM decoders, two data-parallel ranks, and compare every token.

    python tools/demo_sglang.py [--model qwen3_next]      (`make demo-sglang` builds the environment first)

For each model two servers get the same uneven traffic: now prompts for both ranks, now for one while the other has
none. The reference is SGLang without any plugin. Where there is no GPU, a stand-in of the tests lets SGLang run on the
CPU. On a release of SGLang that the ATOM decoders do not support, the second server has the overlay without them. Ends
with `demo-sglang: N/N equal`; the exit status is 0 only if all are equal, the overlay was applied in every
process of its server and in none of the other's, every layer of the ATOM decoders ran in every pass, and a rank
without tokens took part with one row while the other worked.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
from checkpoints import checkpoint, parameters
from toolcache import ROOT

from atom_patches.bench.server import Server, ServerError, free_port, running
from atom_patches.core import discovery, gates
from atom_patches.sglang.engine import ENGINE

sys.path.insert(0, str(ROOT))
from tests.sglang.engines import Steps, prompt, read_steps  # noqa: E402
from tests.sglang.environment import HERE, environment, options  # noqa: E402

GROUP = "sglang.models"
RANKS = 2
LOGS = ROOT / "build" / "demo-sglang"
LOGPROB_BOUND = 1e-3
TIMEOUT_S = 240.0
STARTED = time.monotonic()


@dataclass(frozen=True)
class Model:
    """A checkpoint, how its experts are spread, and its layers: recurrent, attention."""

    checkpoint: str
    kind: str
    layers: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


MODELS = (
    Model("qwen3_5_moe", "Qwen3.5 with experts, in its vision-language wrapper, dp2 ep2", (3, 1), {"ep_size": RANKS}),
    Model("qwen3_next", "Qwen3-Next, dp2 tp2", (3, 1)),
)


@dataclass(frozen=True)
class Request:
    name: str
    tokens: tuple[int, ...]
    new: int
    rank: int
    at: float = 0.0


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int


@dataclass(frozen=True)
class Run:
    """What one server did with the traffic."""

    answers: dict[str, Answer]
    processes: list[dict[str, Any]]
    steps: list[Steps]
    decoder: list[dict[str, Any]]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def waves() -> list[list[Request]]:
    """The traffic: within a wave all is in flight at once, or `at` seconds later."""
    both = [
        Request(f"both ranks, prompt of {n}", prompt(n), 10, i % RANKS) for i, n in enumerate((1, 5, 37, 150, 2, 64))
    ]
    alone = [[Request(f"rank {rank} alone, prompt of {n}", prompt(n), 8, rank)] for rank, n in ((0, 7), (1, 33))]
    overlap = [
        Request("long answer on rank 0", prompt(40, 2), 32, 0),
        Request("meanwhile on rank 1", prompt(3), 6, 1, at=0.5),
    ]
    shared = [Request(f"shared prefix, tail of {n}", prompt(150) + prompt(n), 8, 1) for n in (4, 21)]
    return [both, *alone, overlap, shared]


@functools.cache
def decoders_fit() -> bool:
    """Whether the ATOM decoders support the installed SGLang."""
    group = [patch for patch in discovery.load(ENGINE) if patch.group == GROUP]
    return all(gates.fits(ENGINE, patch).fits for patch in group)


def start(model: Model, path: Path, overlay: bool) -> AbstractContextManager[Server]:
    name = f"{model.checkpoint}-{'atom' if overlay else 'stock'}"
    for part in ("states", "steps", "layers"):
        (LOGS / f"{name}.{part}").mkdir(mode=0o700, parents=True, exist_ok=True)
    asked = {"SGLANG_PLUGINS": "atom,layer_probe", "ATOM_MODELS": "1"} if decoders_fit() else {"SGLANG_PLUGINS": "atom"}
    named = asked if overlay else {}
    env = environment(
        HERE / "layer_probe",
        ATOM_PATCHES_STATE_DIR=str(LOGS / f"{name}.states"),
        SGLANG_STEPS=str(LOGS / f"{name}.steps"),
        LAYER_PROBE=str(LOGS / f"{name}.layers"),
        **(named or {"SGLANG_PLUGINS": "none"}),
    )
    port = free_port()
    wanted = options(
        model_path=path, tp_size=RANKS, dp_size=RANKS, enable_dp_attention=True, chunked_prefill_size=128, port=port,
        host="127.0.0.1", skip_server_warmup=True, **model.options,
    )  # fmt: skip
    command = [sys.executable, "-m", "sglang.launch_server"]
    for option, value in wanted.items():
        flag = f"--{option.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    say(f"{name}: starting")
    return running(name, command, port, env, LOGS)


async def _ask(client: httpx.AsyncClient, request: Request) -> tuple[str, Answer]:
    await asyncio.sleep(request.at)
    sampling = {"temperature": 0, "max_new_tokens": request.new, "ignore_eos": True}
    body = {"input_ids": list(request.tokens), "sampling_params": sampling, "return_logprob": True}
    reply = await client.post("/generate", json=body | {"routed_dp_rank": request.rank})
    reply.raise_for_status()
    said = reply.json()
    logprobs = [value for value, _, _ in said["meta_info"]["output_token_logprobs"]]
    return request.name, Answer(said["output_ids"], logprobs, said["meta_info"]["cached_tokens"])


async def _send(server: Server) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, trust_env=False) as client:
        for wave in waves():
            answers |= dict(await asyncio.gather(*(_ask(client, request) for request in wave)))
            say(f"{server.name}: {len(answers)} requests answered")
    return answers


def run(server: Server) -> Run:
    server.wait(lambda: None)
    say(f"{server.name}: answers at {server.url}")
    try:
        answers = asyncio.run(_send(server))
    except httpx.HTTPError as error:
        server.check()
        raise ServerError(f"{server.name}: {type(error).__name__} {error}") from error
    lines = [json.loads(line) for file in _files(server, "layers") for line in file.read_text().splitlines()]
    return Run(answers, server.status()["processes"], read_steps(LOGS / f"{server.name}.steps"), lines)


def _files(server: Server, part: str) -> list[Path]:
    return sorted((LOGS / f"{server.name}.{part}").glob("*.jsonl"))


def difference(reference: Answer | None, other: Answer | None) -> str:
    """Empty if the two answers are equal, else what is not."""
    if reference is None or other is None or not reference.tokens:
        return "no answer"
    if reference.tokens != other.tokens:
        at = next((i for i, (a, b) in enumerate(zip(reference.tokens, other.tokens, strict=False)) if a != b), None)
        return "differs in length" if at is None else f"differs from token {at} on"
    worst = logprob_difference(reference, other)
    return f"log-probabilities differ by {worst:.2g}" if worst > LOGPROB_BOUND else ""


def logprob_difference(reference: Answer, other: Answer) -> float:
    return max(abs(one - two) for one, two in zip(reference.logprobs, other.logprobs, strict=True))


def compare(model: Model, size: int, stock: Run, atom: Run) -> list[bool]:
    print(f"\n{model.checkpoint}: {model.kind}, {size / 1e6:.1f}M parameters, stock against "
          f"{'ATOM_MODELS=1' if decoders_fit() else 'the overlay, which has no decoder for this release'}")  # fmt: skip
    print(f"  {'request':<30}{'prompt':>7}{'cached':>8}{'tokens':>8}  equal")
    verdicts: list[bool] = []
    for request in (request for wave in waves() for request in wave):
        one, two = stock.answers.get(request.name), atom.answers.get(request.name)
        wrong = difference(one, two)
        shown = f"NO: {wrong}"
        if not wrong and one and two:
            shown = f"yes, log-probabilities within {logprob_difference(one, two):.1e}"
        counts = (two.cached, len(two.tokens)) if two else ("", "")
        print(f"  {request.name:<30}{len(request.tokens):>7}{counts[0]:>8}{counts[1]:>8}  {shown}")
        verdicts.append(not wrong)
    return verdicts


def idle_passes(atom: Run, rank: int) -> list[dict[str, Any]]:
    return [line for line in atom.decoder if line["rank"] == rank and line["logical"] == 0]


def show_processes(stock: Run, atom: Run) -> None:
    print(f"  stock: {len(stock.processes)} processes armed, model {', '.join(sorted({s.model for s in stock.steps}))}")
    print("  with the overlay:")
    for process in atom.processes:
        applied = [patch["id"] for patch in process["patches"] if patch["state"] == "applied"]
        print(f"    {', '.join(process['roles'])} {process['pid']}: {', '.join(applied) or 'nothing applied'}")
    for steps in atom.steps:
        modes = Counter(step["mode"] for step in steps.steps)
        passes = [line for line in atom.decoder if line["rank"] == steps.rank]
        idle = idle_passes(atom, steps.rank)
        ran = sum(line.get("recurrent", 0) + line.get("attention", 0) for line in passes)
        print(f"    rank {steps.rank}: {steps.model}")
        print(f"      {', '.join(f'{count} {mode}' for mode, count in sorted(modes.items()))}; the ATOM decoder ran in "
              f"{len(passes)} passes, {ran} layers, {len(idle)} passes idle with one row")  # fmt: skip


def faults(model: Model, stock: Run, atom: Run) -> Iterator[str]:
    """What must hold beside equal tokens."""
    name = model.checkpoint
    if stock.processes:
        yield f"{name}: the stock server's processes were armed"
    if stray := {s.model for s in stock.steps if s.model.startswith("atom_patches")}:
        yield f"{name}: the stock server ran {', '.join(stray)}"
    if not atom.processes:
        yield f"{name}: no process of the overlay's server says that it is armed"
    for process in atom.processes:
        if not any(patch["state"] == "applied" for patch in process["patches"]):
            yield f"{name}: nothing applied in process {process['pid']} ({', '.join(process['roles'])})"
        if not decoders_fit():
            continue
        schedules = any("scheduler" in role for role in process["roles"])
        if schedules and not any(p["state"] == "applied" and p["id"].startswith(GROUP) for p in process["patches"]):
            yield f"{name}: no {GROUP}* patch applied in scheduler {process['pid']}"
    if [s.rank for s in atom.steps] != list(range(RANKS)):
        yield f"{name}: ranks {[s.rank for s in atom.steps]} ran, not {RANKS}"
    for steps in atom.steps if decoders_fit() else ():
        if not steps.model.startswith("atom_patches."):
            yield f"{name}: rank {steps.rank} ran {steps.model}"
        passes = [line for line in atom.decoder if line["rank"] == steps.rank]
        if not passes or any((line.get("recurrent"), line.get("attention")) != model.layers for line in passes):
            yield f"{name}: not every layer of rank {steps.rank} ran in every one of {len(passes)} passes"
        idle = idle_passes(atom, steps.rank)
        if not any(sum(line["physical"]) > RANKS for line in idle):
            yield f"{name}: rank {steps.rank} was never idle while the other worked"
        if any(line["physical"][steps.rank] != 1 for line in idle):
            yield f"{name}: rank {steps.rank} was idle with another number of rows than one"


def show(model: Model) -> tuple[list[bool], list[str]]:
    path = checkpoint(model.checkpoint)
    # The second server starts while the first one answers.
    with start(model, path, overlay=False) as one, start(model, path, overlay=True) as two:
        stock, atom = run(one), run(two)
    verdicts = compare(model, parameters(path), stock, atom)
    show_processes(stock, atom)
    return verdicts, list(faults(model, stock, atom))


def _interrupted(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[model.checkpoint for model in MODELS], help="only this one")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupted)  # so that servers are ended on the way out
    _empty(LOGS)
    verdicts: list[bool] = []
    wrong: list[str] = []
    for model in MODELS:
        if args.model in (None, model.checkpoint):
            try:
                equal, found = show(model)
            except ServerError as error:
                equal, found = [False], [str(error)]
            verdicts += equal
            wrong += found
    print()
    for text in wrong:
        say(f"FAILED: {text}")
    say(f"logs are in {LOGS.relative_to(ROOT)}")
    print(f"demo-sglang: {sum(verdicts)}/{len(verdicts)} equal", flush=True)
    return 0 if all(verdicts) and not wrong else 1


def _empty(folder: Path) -> None:
    """What an earlier run wrote must not count for this one."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


if __name__ == "__main__":
    sys.exit(main())
