"""`bench pcp`: what prefill context parallelism gains, from each rank's work on one GPU and modelled collectives."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atom_patches import arming
from atom_patches.cli import CommandError
from atom_patches.runtime.link import Link

if TYPE_CHECKING:
    from atom_patches.bench.pcp_answer import Answer, Question
    from atom_patches.bench.pcp_model import Part
    from atom_patches.cli.parsing import Commands
    from atom_patches.kernels.suite import Setup

LENGTHS = {"qwen3.6-35b-a3b": (16384, 65536, 262144), "tiny": (64, 256)}
"""Prompt lengths of each shape, if none are asked for."""

WARM_LIMIT = 75.0
"""Seconds for the warming-up."""

WARM_WORKERS = 8
"""Processes that compile; each holds tensors of a part on the GPU."""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "bench pcp",
        "time each rank's work in a split prefill of a hybrid model, on one GPU",
        "Time the parts of a prefill on one GPU as each rank of prefill context parallelism runs them, "
        "model the collectives, and compare with one rank. Exit status: 0 fine, 1 something was not measured, 2 no "
        "GPU.",
        [
            ("bench pcp", "2, 4 and 8 ranks, three lengths of prompts"),
            ("bench pcp --lengths 65536 --worlds 2 --kernels auto --json parts.json", "one answer, kept"),
            (
                "bench pcp --parts parts.json --lengths 65536 --worlds 2 --kernels auto --link-bandwidth 50",
                "another link",
            ),
            ("bench pcp --device cpu --shape tiny", "try the command without a GPU"),
        ],
    )
    parser.add_argument("--shape", choices=tuple(LENGTHS), default="qwen3.6-35b-a3b", help="the model's dimensions")
    parser.add_argument("--lengths", type=_numbers, help="prompt lengths, separated by commas")
    parser.add_argument("--worlds", type=_numbers, default=(2, 4, 8), help="numbers of ranks (2,4,8)")
    parser.add_argument(
        "--kernels",
        choices=("all", "engine", "overlay", "auto"),
        default="all",
        help="whose the ranks run; overlay: the engine's, and this package's scans",
    )
    parser.add_argument(
        "--only",
        type=_words,
        default=frozenset(),
        metavar="WAY,...",
        help="only these ways to split, of each kind (zigzag,relay,replicate)",
    )
    parser.add_argument("--engine", choices=(*arming.ENGINES, "none"), help="whose kernels one rank runs")
    parser.add_argument(
        "--link-bandwidth",
        type=_positive,
        default=Link().bandwidth / 1e9,
        metavar="GB/S",
        help="a direction (%(default)g)",
    )
    parser.add_argument(
        "--link-latency",
        type=_positive,
        default=Link().latency * 1e6,
        metavar="US",
        help="of a collective (%(default)g)",
    )
    parser.add_argument("--limit", type=_positive, default=300.0, metavar="SECONDS", help="start no part later (300)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: the references, to try the benchmark")
    parser.add_argument("--no-warm", action="store_true", help="do not compile everything first, in parallel processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--parts", type=Path, metavar="FILE", help="measure nothing: take the parts of this --json")
    earlier.add_argument("--more", type=Path, metavar="FILE", help="measure only what this --json lacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure the parts, or take those of an earlier run; put them together, print and write."""
    from atom_patches.bench import pcp_text

    question = _question(arguments)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise CommandError(f"--json {arguments.json}: there is no such directory.")
    answer = _measured(arguments, question) if arguments.parts is None else _read(arguments.parts, question)
    if answer is None:
        return 2
    _write(arguments.json, answer)
    print(pcp_text.render(answer))
    return 1 if answer.problems or answer.interrupted else 0


def _measured(arguments: argparse.Namespace, question: Question) -> Answer | None:
    """What this machine finds; None if there is no GPU."""
    from atom_patches.bench import pcp_worker
    from atom_patches.bench.pcp_answer import Answer
    from atom_patches.kernels import suite

    begin, needed = time.monotonic(), question.parts()
    known = None if arguments.more is None else _read(arguments.more, question)
    if known is not None:
        needed = [part for part in needed if part not in known.times]
    setup = suite.Setup(arguments.device, _engine(arguments), ())
    # Processes that follow reuse what one of them found out about a kernel's configurations.
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    try:
        running = suite.Suite(setup, functools.partial(pcp_worker.serve, needed, question.shape.name))
    except suite.NoDevice as error:
        print(f"atom_patches: {error}", file=sys.stderr)
        return None
    except suite.SuiteError as error:
        raise CommandError(str(error)) from error
    answer = Answer(question, running.machine)
    try:
        if known is not None:
            answer.include(known)
        if setup.device != "cpu" and not arguments.no_warm:
            _warm(setup, question, needed, begin)
        for number, (part, key) in enumerate(zip(needed, running.cases, strict=True), 1):
            passed = time.monotonic() - begin
            if passed > arguments.limit:
                answer.problems[part] = f"not begun within {arguments.limit:g} s"
                continue
            answer.add(part, next(running.run([key])))
            _progress(f"[{number}/{len(needed)}, {passed:.0f} s] {key.operation}  {key.label}  {answer.brief(part)}")
            if number % 8 == 0:
                _write(arguments.json, answer, finished=False)
    except ValueError as error:
        raise CommandError(f"--more {arguments.more}: {error}") from error
    except suite.SuiteError as error:
        answer.interrupted = f"after {len(answer.times)} of {len(needed)} parts: {error}"
    except KeyboardInterrupt:
        answer.interrupted = f"interrupted after {len(answer.times)} of {len(needed)} parts"
    finally:
        running.close()
    return answer


def _read(path: Path, question: Question) -> Answer:
    from atom_patches.bench import pcp_answer

    try:
        return pcp_answer.restored(json.loads(path.read_text(encoding="utf-8")), question)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CommandError(f"{path}: not a file that `bench pcp --json` wrote ({error}).") from error


def _write(path: Path | None, answer: Answer, finished: bool = True) -> None:
    from atom_patches.bench.pcp_answer import document

    if path is not None:
        path.write_text(json.dumps(document(answer, finished), indent=1) + "\n", encoding="utf-8")


# Input


def _question(arguments: argparse.Namespace) -> Question:
    from atom_patches.bench.pcp_answer import Question
    from atom_patches.bench.pcp_model import EXPERTS, LAYOUTS, RECURRENT, SHAPES

    shape = SHAPES[arguments.shape]
    if arguments.device == "cpu" and arguments.shape != "tiny":
        raise CommandError("--device cpu serves --shape tiny only: the references would take hours at this shape.")
    kernels = ("engine", "overlay", "auto") if arguments.kernels == "all" else (arguments.kernels,)
    only: frozenset[str] = arguments.only
    ways = {*LAYOUTS, *RECURRENT, *EXPERTS}
    if not only <= ways:
        raise CommandError(f"--only takes some of {', '.join(sorted(ways))}, got {', '.join(sorted(only - ways))}.")
    lengths: tuple[int, ...] = arguments.lengths or LENGTHS[arguments.shape]
    worlds: tuple[int, ...] = arguments.worlds
    if min(worlds) < 2 or max(worlds) > shape.experts:
        raise CommandError(f"--worlds takes numbers from 2 to {shape.experts}, got {','.join(map(str, worlds))}.")
    if min(lengths) < 2 * max(worlds):
        raise CommandError(f"--lengths must be at least {2 * max(worlds)}, two rows a rank, got {min(lengths)}.")
    link = Link(arguments.link_bandwidth * 1e9, arguments.link_latency * 1e-6)
    return Question(shape, tuple(sorted(lengths)), tuple(sorted(worlds)), kernels, link, only)


def _engine(arguments: argparse.Namespace) -> str | None:
    """The engine whose kernels are stock; without one, stock is what `auto` takes."""
    if arguments.device == "cpu" or arguments.engine == "none":
        return None
    asked = arming.ENGINES if arguments.engine is None else (arguments.engine,)
    for name in asked:
        if importlib.util.find_spec(name) is not None:
            return name
    raise CommandError(
        f"none of {', '.join(asked)} is installed here, and stock is an engine's kernels. Install one, or give "
        "--engine none to compare this package's kernels with themselves."
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers above 0, separated by commas, are needed")
    return found


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 is needed")
    return found


def _warm(setup: Setup, question: Question, needed: Sequence[Part], begin: float) -> None:
    from atom_patches.bench import pcp_worker

    compiled = [part for part in needed if part.kind != "attention"]
    workers = min(WARM_WORKERS, os.cpu_count() or 1)
    _progress(f"compiling for {len(compiled)} parts in {workers} processes, for at most {WARM_LIMIT:.0f} s")
    warmed = pcp_worker.warm(compiled, question.shape.name, setup, workers, WARM_LIMIT)
    for number, (part, problem) in enumerate(warmed, 1):
        if problem or number % 16 == 0:
            passed = time.monotonic() - begin
            told = problem or "compiled"
            _progress(f"[{number}/{len(compiled)}, {passed:.0f} s] {part.kind} {part.rows} rows: {told}")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
