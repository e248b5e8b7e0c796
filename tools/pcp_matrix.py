"""Run prefill context parallelism over models, numbers of ranks, kinds of traffic and settings, on the CPU.

    python tools/pcp_matrix.py [--worlds 2,3] [--models qwen3,qwen3_next] [--limit N] [--list]

Every engine gets the same traffic as one without prefill context parallelism, which is itself held to transformers,
and has to give the same: tokens, log-probabilities, cached tokens, preemptions, free blocks. Not every combination
runs, but every two values of two factors meet in one that does (tools/pairwise.py); those that cannot be served have to
be refused by name. One line a combination; progress goes to stderr, logs lie in build/pcp-matrix. The exit status is 1
when anything differs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_runs import Outcome, Start, finished, run_all
from pcp_combos import MODELS, WORLDS, Combo, refused_words, selection
from pcp_differences import first_difference, unlike_asked
from toolcache import ROOT

sys.path.insert(0, str(ROOT))
from tests.vllm import pcp_waves  # noqa: E402
from tests.vllm.gdn_oracle import CLOSE, environment, run_engines  # noqa: E402
from tests.vllm.pcp_engines import Engine, check_greedy, engine, launch, single, wave  # noqa: E402

LOGS = ROOT / "build" / "pcp-matrix"
STARTED = time.monotonic()
#: Case -> its waves for a model.
WAVES: dict[str, Callable[[str], list[list[dict[str, Any]]]]] = {
    "mixed lengths": lambda _: [wave()],
    "chunks": lambda _: [wave()],
    "prefill and decode": lambda _: [[one for one in pcp_waves.STAGGERED if one["abort_at"] is None]],
    "prefix caching": pcp_waves.cached_waves,
    "preemption": lambda _: [pcp_waves.CROWDED, pcp_waves.TINY, pcp_waves.ALONE],
    "aborts": lambda _: [pcp_waves.STAGGERED, pcp_waves.SHORTEST],
    "one token": lambda _: [pcp_waves.SHORTEST],
    "log-probabilities": lambda _: [pcp_waves.SCORED],
    "seeded n=2": lambda _: [pcp_waves.SEEDED],
    "penalties": lambda _: [pcp_waves.STEERED],
}


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def case_options(model: str, case: str) -> dict[str, Any]:
    """The engine options that make the case."""
    crowded = pcp_waves.SMALL_PAGES if MODELS[model].key_heads else pcp_waves.SMALL
    special = {"chunks": pcp_waves.CHUNKED, "prefix caching": pcp_waves.CACHING, "preemption": crowded}
    return special.get(case, {})


def reference_engine(model: str, case: str) -> Engine:
    """The engine without prefill context parallelism."""
    return engine(model, WAVES[case](model), distributed_executor_backend="uni", **case_options(model, case))


def split_engine(combo: Combo) -> Engine:
    """The engine of one combination."""
    options = {**case_options(combo.model, combo.case), **combo.options}
    size = {"prefill_context_parallel_size": combo.world}
    return engine(combo.model, WAVES[combo.case](combo.model), env=combo.env, **options, **size)


def progress(name: str, folder: Path, total: int) -> Callable[[], None]:
    """Say now and then how many engines are done."""
    said = [time.monotonic()]

    def tell() -> None:
        if time.monotonic() - said[0] > 20:
            said[0] = time.monotonic()
            say(f"{name}: {min(map(len, finished(folder)), default=0)} of {total} engines done")

    return tell


def time_limit(engines: int, ranks: int) -> float:
    """Far more than two cores take, in seconds: what is not done by then hangs."""
    return 120 + 60 * ranks + engines * (40 + 15 * ranks)


def start_references(folder: Path, engines: dict[Any, Engine]) -> dict[Any, list[dict[str, Any]]]:
    results = single(folder, engines, time_limit(len(engines), 1), progress("pcp=1", folder, len(engines)))
    return {key: [result] for key, result in results.items()}


def start_world(ranks: int) -> Start:
    def start(folder: Path, engines: dict[Any, Engine]) -> dict[Any, list[dict[str, Any]]]:
        tell = progress(f"{ranks} ranks", folder, len(engines))
        return launch(folder, ranks, engines, time_limit(len(engines), ranks), tell)

    return start


def configured(combos: list[Combo]) -> list[str]:
    """For every combination the error by which its configuration is refused; empty: it is accepted."""
    folder = LOGS / "configurations"
    folder.mkdir(parents=True)
    options = {"prefill_context_parallel_size", "enable_expert_parallel", "language_model_only"}
    plan = []
    for combo in combos:
        made = split_engine(combo)
        kept = {name: value for name, value in made["options"].items() if name in options}
        plan.append({"model": made["model"], "enforce_eager": True, "env": combo.env, **kept})
    [results] = run_engines(folder, [plan], [environment()], "configs.py")
    return [result.get("refused", "") for result in results]


def judge_refusal(combo: Combo, message: str) -> str:
    """Empty if the configuration was accepted and has to be, or was refused in the words that it has to be."""
    words = refused_words(combo)
    if words and not message:
        return f"accepted, and should be refused: {', '.join(words)}"
    if message and not words:
        return f"refused: {reason(message)}"
    missing = [word for word in words if word not in message]
    return f"the refusal does not say {', '.join(missing)}: {reason(message)}" if missing else ""


def reason(message: str) -> str:
    """The reasons that a refusal lists, without the lines that lead up to them."""
    lines = (line.strip() for line in message.splitlines())
    return "; ".join(line[2:] for line in lines if line.startswith("- ") and not line.endswith(":")) or message


def judge(combo: Combo, reference: Outcome, outcome: Outcome) -> str:
    """Empty if the engine gave what it has to, else the first difference."""
    if isinstance(reference, str):
        return f"pcp=1 failed: {reference}"
    if isinstance(outcome, str):
        return f"failed: {outcome}"
    waves = WAVES[combo.case](combo.model)
    try:
        for sent, got in zip(waves, reference[0]["waves"], strict=True):
            check_greedy(combo.model, sent, got)
    except AssertionError as error:
        return f"pcp=1 differs from transformers: {error}"
    # Either may be that far from the truth.
    return first_difference(waves, reference[0], outcome, 2 * CLOSE) or unlike_asked(combo, reference[0], outcome)


@dataclass
class Table:
    """Prints one line a combination, and counts."""

    counts: dict[str, int] = field(default_factory=lambda: {"equal": 0, "refused": 0, "different": 0})

    def head(self) -> None:
        self._line("model", "ranks", "case", "settings", "result")

    def add(self, combo: Combo, kind: str, detail: str = "") -> None:
        self.counts[kind] += 1
        word = "DIFFERENT" if kind == "different" else kind
        result = f"{word}: {detail}" if detail else word
        self._line(combo.model, combo.ranks, combo.case, combo.settings, result)

    def _line(self, *columns: str) -> None:
        print("{:<17}{:>5}  {:<19}{:<55}{}".format(*columns), flush=True)

    def foot(self) -> None:
        counted = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        print(f"pcp-matrix: {counted}", flush=True)


def run(combos: list[Combo]) -> dict[str, int]:
    """Run them, print the table, return how many were equal, refused and different."""
    table = Table()
    say(f"{len(combos)} combinations: making their configurations")
    messages = dict(zip(combos, configured(combos), strict=True))
    table.head()
    accepted: list[Combo] = []
    for combo, message in messages.items():
        if wrong := judge_refusal(combo, message):
            table.add(combo, "different", wrong)
        elif message:
            table.add(combo, "refused", reason(message))
        else:
            accepted.append(combo)
    references = run_references(accepted)
    for ranks in sorted({combo.world for combo in accepted}):
        engines = {combo: split_engine(combo) for combo in accepted if combo.world == ranks}
        say(f"{ranks} ranks: {len(engines)} engines")
        outcomes = run_all(LOGS, f"{ranks}-ranks", start_world(ranks), engines, say)
        for combo in engines:
            wrong = judge(combo, references[combo.model, combo.case], outcomes[combo])
            table.add(combo, "different" if wrong else "equal", wrong)
    table.foot()
    return table.counts


def run_references(combos: list[Combo]) -> dict[Any, Outcome]:
    """By model and case, what one rank without prefill context parallelism gives."""
    engines = {(combo.model, combo.case): reference_engine(combo.model, combo.case) for combo in combos}
    say(f"pcp=1: {len(engines)} engines")
    return run_all(LOGS, "unsplit", start_references, engines, say)


def quiet() -> None:
    """Leave transformers' progress bars and hints out."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def chosen(text: str, known: tuple[str, ...]) -> set[str]:
    """The values of an option that takes several, separated by commas."""
    values = set(text.split(","))
    if unknown := values - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = tuple(MODELS)
    parser.add_argument("--worlds", type=lambda text: chosen(text, WORLDS), default=set(WORLDS), metavar="2,3,…")
    parser.add_argument("--models", type=lambda text: chosen(text, models), default=set(models), metavar="NAME,…")
    parser.add_argument("--limit", type=int, metavar="N", help="run only the first N that are served")
    parser.add_argument("--list", action="store_true", help="name the combinations and run none")
    args = parser.parse_args()
    combos = selection(args.worlds, args.models, args.limit)
    if args.list:
        for combo in combos:
            print(f"{combo}  (refused)" if refused_words(combo) else combo)
        return 0
    quiet()
    shutil.rmtree(LOGS, ignore_errors=True)
    counts = run(combos)
    return 0 if counts["equal"] and not counts["different"] else 1


if __name__ == "__main__":
    sys.exit(main())
