"""Serve a dense and a hybrid model stock and with prefill context parallelism, and compare every token.

    python tools/demo_pcp.py [--pcp 2] [--model qwen3_demo]      (`make demo` builds the environment first)

For each model two servers get the same traffic (tools/demo_traffic.py). The dense
model's reference is vLLM without any plugin. vLLM has no GatedDeltaNet for CPU machines, so the hybrid's reference has
this package's, and pcp=1. On a release of vLLM that the split does not support, vLLM without any plugin is compared
with vLLM with this package, both at pcp=1. Ends with `demo: N/N equal`; the exit status is 0 only if all are equal,
every server process applied patches, and every rank of a split ran fewer rows than there were.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import demo_traffic
from checkpoints import checkpoint, parameters
from demo_server import Server, ServerError, serve
from demo_traffic import Answer
from toolcache import ROOT

from atom_patches.core import discovery, gates
from atom_patches.vllm.engine import ENGINE

FEATURE = "vllm.pcp."
# Prompts are cut into chunks of at most 512 rows; eight run at once; caches are shared where prompts begin alike.
OPTIONS = ("--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "512",
           "--enable-prefix-caching")  # fmt: skip
HITS = "vllm:prefix_cache_hits_total"
LOGPROB_BOUND = 1e-3
LOGS = ROOT / "build" / "demo"
STARTED = time.monotonic()


@dataclass(frozen=True)
class Model:
    checkpoint: str
    kind: str
    reference_plugins: str
    dtype: str = "float32"
    options: tuple[str, ...] = ()


MODELS = (Model("qwen3_demo", "dense", ""), Model("qwen3_next_demo", "hybrid", "atom"))
# Later releases of vLLM have CPU kernels for GatedDeltaNet, of one dtype, whose sums depend on the batch: it is one
# request.
ALONE = ("--max-num-seqs", "1")
LATER_MODELS = (Model("qwen3_demo", "dense", ""), Model("qwen3_next_demo", "hybrid", "", "bfloat16", ALONE))


@dataclass(frozen=True)
class Rows:
    """What the projections of one rank's model saw, counted by hooks on its modules."""

    passes: int
    total: int

    @classmethod
    def of(cls, passes: list[dict[str, list[int]]]) -> Rows:
        return cls(len(passes), sum(rows for seen in passes for rows in seen["projections"]))


@dataclass(frozen=True)
class Run:
    """What one server did with the traffic."""

    answers: list[Answer]
    processes: list[dict[str, Any]]
    cache_hits: int
    rows: list[Rows]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def start(model: Model, path: Path, role: str, plugins: str, pcp: int) -> AbstractContextManager[Server]:
    name = f"{model.checkpoint}-{role}"
    say(f"{name}: starting")
    return serve(path, name, plugins, pcp, (*OPTIONS, *model.options), LOGS, model.dtype)


def send_traffic(server: Server) -> Run:
    waited = 0

    def meanwhile() -> None:
        nonlocal waited
        waited += 1
        if waited % 10 == 0:
            say(f"{server.name}: still starting")

    server.wait(meanwhile)
    say(f"{server.name}: answers at {server.url}")
    server.workers("probe_start")
    answers = demo_traffic.run(server.url, lambda count: say(f"{server.name}: {count} requests answered"))
    server.check()
    server.log.with_suffix(".answers.json").write_text(json.dumps([asdict(answer) for answer in answers]))
    rows = [Rows.of(passes) for passes in server.workers("probe_take")]
    return Run(answers, server.status()["processes"], round(server.metric(HITS)), rows)


def difference(reference: Answer, other: Answer) -> str:
    """Empty if the two answers are equal, else what is not."""
    if reference.error or other.error:
        return f"error: {reference.error or other.error}"
    if not reference.tokens or any(not choice for choice in reference.tokens):
        return "no tokens"
    for number, (one, two) in enumerate(zip(reference.tokens, other.tokens, strict=False)):
        if one != two:
            at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
            return f"choice {number} differs from token {at} on"
    if len(reference.tokens) != len(other.tokens):
        return f"{len(reference.tokens)} and {len(other.tokens)} choices"
    if (worst := logprob_difference(reference, other)) > LOGPROB_BOUND:
        return f"log-probabilities differ by {worst:.2g}"
    return ""


def logprob_difference(reference: Answer, other: Answer) -> float:
    pairs = zip(reference.logprobs, other.logprobs, strict=True)
    return max((abs(one - two) for one, two in pairs), default=0.0)


def compare(model: Model, size: int, pcp: int, reference: Run, split: Run) -> list[bool]:
    what = f"pcp=1 against pcp={pcp}" if pcp > 1 else "stock against the overlay"
    print(f"\n{model.checkpoint}: {model.kind}, {size / 1e6:.1f}M parameters, {what}")
    print(f"  {'request':<28}{'prompt':>8}{'tokens':>8}  {'sent as':<9}equal")
    verdicts: list[bool] = []
    others = {answer.name: answer for answer in split.answers}
    for one in reference.answers:
        two = others.get(one.name, Answer(one.name, one.kind, error="not sent"))
        wrong = difference(one, two)
        note = f"yes, log-probabilities within {logprob_difference(one, two):.1e}" if one.logprobs else "yes"
        count = sum(len(choice) for choice in one.tokens)
        print(f"  {one.name:<28}{one.prompt_tokens:>8}{count:>8}  {one.kind:<9}{f'NO: {wrong}' if wrong else note}")
        verdicts.append(not wrong)
    print(f"  prompt tokens taken from the prefix cache: {reference.cache_hits} and {split.cache_hits}")
    return verdicts


def show_processes(title: str, run: Run) -> None:
    print(f"  {title}")
    for process in run.processes:
        by_folder: dict[str, list[str]] = {}
        for patch in process["patches"]:
            if patch["state"] == "applied":
                folder, _, name = patch["id"].rpartition(".")
                by_folder.setdefault(folder, []).append(name)
        print(
            f"    {', '.join(process['roles'])} {process['pid']}: {sum(map(len, by_folder.values()))} patches applied"
        )
        for folder, names in by_folder.items():
            print(
                textwrap.fill(f"{folder}: {', '.join(names)}", 110, initial_indent=" " * 6, subsequent_indent=" " * 8)
            )
    for rank, seen in enumerate(run.rows):
        print(f"    rank {rank} ran {seen.total:,} rows in {seen.passes:,} forward passes")


def faults(model: Model, pcp: int, reference: Run, split: Run) -> Iterator[str]:
    """What must hold beside equal tokens: patches where they are asked for, and only there; rows that shrink."""
    if not model.reference_plugins and reference.processes:
        yield f"{model.checkpoint}: the stock server loaded the overlay"
    for process in reference.processes:
        if stray := [p["id"] for p in process["patches"] if p["state"] == "applied" and p["id"].startswith(FEATURE)]:
            yield f"{model.checkpoint}: applied at pcp=1 in process {process['pid']}: {', '.join(stray)}"
    if not split.processes:
        yield f"{model.checkpoint}: no process of the pcp={pcp} server says that it is armed"
    for process in split.processes:
        if not any(patch["state"] == "applied" for patch in process["patches"]):
            roles = ", ".join(process["roles"])
            yield f"{model.checkpoint}: zero patches applied in process {process['pid']} ({roles})"
    if pcp == 1:
        return
    workers = [process for process in split.processes if "worker" in process["roles"]]
    if len(workers) != pcp:
        yield f"{model.checkpoint}: {len(workers)} workers, not {pcp}"
    for process in workers:
        if not any(p["state"] == "applied" and p["id"].startswith(FEATURE) for p in process["patches"]):
            yield f"{model.checkpoint}: no {FEATURE}* patch applied in worker {process['pid']}"
    for rank, seen in enumerate(split.rows):
        if seen.total >= reference.rows[0].total:
            yield f"{model.checkpoint}: rank {rank} ran {seen.total} rows, the reference {reference.rows[0].total}"


def show(model: Model, pcp: int) -> tuple[list[bool], list[str]]:
    path = checkpoint(model.checkpoint)
    # The second server starts while the first one answers.
    with (
        start(model, path, "reference", model.reference_plugins, 1) as one,
        start(model, path, f"pcp{pcp}", "atom", pcp) as two,
    ):
        reference = send_traffic(one)
        split = send_traffic(two)
    verdicts = compare(model, parameters(path), pcp, reference, split)
    show_processes(
        "the reference's processes" if reference.processes else "the reference: stock, no process armed", reference
    )
    show_processes(f"the pcp={pcp} server's processes", split)
    return verdicts, list(faults(model, pcp, reference, split))


def split_is_supported() -> bool:
    """Whether prefill context parallelism fits the installed vLLM."""
    split = [patch for patch in discovery.load(ENGINE) if patch.group == FEATURE.rstrip(".")]
    return all(gates.fits(ENGINE, patch).fits for patch in split)


def _interrupted(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pcp", type=int, help="2 where this release of vLLM supports it, else 1")
    parser.add_argument("--model", choices=[model.checkpoint for model in MODELS], help="only this one")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupted)  # so that servers are ended on the way out
    LOGS.mkdir(parents=True, exist_ok=True)
    verdicts: list[bool] = []
    wrong: list[str] = []
    supported = split_is_supported()
    pcp = args.pcp or (2 if supported else 1)
    for model in MODELS if supported else LATER_MODELS:
        if args.model in (None, model.checkpoint):
            try:
                equal, found = show(model, pcp)
            except ServerError as error:
                equal, found = [False], [str(error)]
            verdicts += equal
            wrong += found
    print()
    for text in wrong:
        say(f"FAILED: {text}")
    say(f"logs and answers are in {LOGS.relative_to(ROOT)}")
    print(f"demo: {sum(verdicts)}/{len(verdicts)} equal", flush=True)
    return 0 if all(verdicts) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
