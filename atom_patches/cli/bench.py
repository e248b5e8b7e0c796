"""`bench [OP ...]`: time the kernels against the engine's own, after checking what they compute."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom_patches import arming
from atom_patches.cli import CommandError, bench_report
from atom_patches.core import settings

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands
    from atom_patches.kernels.results import CaseReport, Machine, Served
    from atom_patches.kernels.suite import Key, Setup

ORDER = ("engine", "aiter", "triton", "torch")
RANKED = {"engine", "aiter", "triton"}
"""Whom a ranking needs; the reference is the last resort where it was not timed."""

SLOWEST = 0.99
"""`auto` may not fall below this times the engine's own speed."""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "bench",
        "time the kernels against the engine's own",
        "Check every provider against the reference, then time it. Exit status: 0 fine, 1 a provider is "
        "wrong or `auto` is slower than the engine, 2 no GPU.",
        [
            ("bench", "every operator, beside the engine that is installed"),
            ("bench gdn_prefill --case '16384*' --providers engine,triton", "some cases of one operator"),
            ("bench fused_moe --warm --json found.json --html report.html", "a report to pass on"),
            ("bench rms_norm --device cpu --case '1 x 2048*'", "try the command without a GPU"),
        ],
    )
    parser.add_argument("filters", metavar="OP", nargs="*", help="operators or families; none: all of them")
    parser.add_argument("--case", metavar="PATTERN", default="*", help="cases whose label matches, such as '16 x*'")
    parser.add_argument("--providers", type=_providers, default=ORDER, help="of engine,aiter,triton,torch")
    parser.add_argument(
        "--engine", choices=(*arming.ENGINES, "none"), help="whose kernels are the baseline; else the installed"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: times the references only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots, one file by itself")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios (needs matplotlib)")
    parser.add_argument("--record", action="store_true", help="write the table from which `auto` chooses on this GPU")
    parser.add_argument("--warm", action="store_true", help="compile everything first, in parallel processes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, and write what was asked for."""
    from atom_patches.kernels import ranking, suite

    setup = suite.Setup(arguments.device, _engine(arguments), _asked(arguments))
    if arguments.record and (not set(arguments.providers) >= RANKED or setup.engine is None):
        raise CommandError(
            "--record needs an engine and its, AITER's and Triton's kernels: a ranking that lacks one would hide it."
        )
    try:
        running = suite.Suite(setup)
    except suite.NoDevice as error:
        print(f"atom_patches: {error}", file=sys.stderr)
        return 2
    except suite.SuiteError as error:
        raise CommandError(str(error)) from error
    found, begin = Found(running.machine, running.broken), time.monotonic()
    try:
        keys = _selected(running.cases, arguments)
        if arguments.warm and setup.device != "cpu":
            _warm(setup, keys)
        for number, report in enumerate(running.run(keys), 1):
            passed = time.monotonic() - begin
            _progress(f"[{number}/{len(keys)}, {passed:.0f} s] {report.operation}  {report.label}  {_brief(report)}")
            found.add(report)
            _write(arguments.json, found)
    except KeyboardInterrupt:
        found.broken = found.broken | {"the run": f"interrupted after {len(found.reports)} cases"}
    finally:
        running.close()
    if arguments.record:
        found.chosen = ranking.automatic(found.reports)
        _progress(f"recorded in {ranking.record(found.machine, found.reports)}")
    print(render(found))
    _write(arguments.json, found)
    if arguments.html is not None:
        arguments.html.write_text(bench_report.page(document(found)), encoding="utf-8")
    if arguments.picture is not None:
        _draw(arguments.picture, found)
    return 1 if list(_findings(found)) else 0


class Found:
    """What a run has found out so far; `chosen` is whom `auto` takes in each case."""

    def __init__(self, machine: Machine, broken: dict[str, str]) -> None:
        self.machine = machine
        self.broken = broken
        self.reports: list[CaseReport] = []
        self.chosen: list[str | None] = []

    def add(self, report: CaseReport) -> None:
        self.reports.append(report)
        self.chosen.append(report.auto)

    def __iter__(self) -> Iterator[tuple[CaseReport, str | None]]:
        return zip(self.reports, self.chosen, strict=True)


def render(found: Found) -> str:
    """The results as text: a case, then one line a provider."""
    machine, ceilings = found.machine, found.machine.ceilings
    lines = [f"{machine.device}  ({', '.join(f'{name} {one}' for name, one in machine.versions.items())})"]
    if machine.kind == "cpu":
        lines.append("THE REFERENCES ON A CPU, to try the benchmark itself: these times say nothing about a GPU.")
    lines.append(
        f"ceilings: {ceilings.bandwidth / 1e9:,.0f} GB/s, {ceilings.rate / 1e12:,.3g} TFLOP/s  ({ceilings.how})"
    )
    lines.append("")
    lines.append(f"  {'':<10} {'time':>12} {'GB/s':>8} {'TFLOP/s':>9} {'roofline':>9} {'vs engine':>10}")
    for report, auto in found:
        lines += _case_lines(machine, report, auto)
    return "\n".join([*lines, "", *(list(_findings(found)) or [f"{len(found.reports)} cases, nothing wrong"])])


def document(found: Found) -> dict[str, Any]:
    """The results as plain data, in the form that `--json` writes."""
    cases = [
        asdict(report)
        | {
            "auto": auto,
            "floor": found.machine.ceilings.floor(report.bytes, report.flops),
            "ratios": {name: report.ratio(name) for name in report.providers},
            "auto_ratio": report.ratio(auto),
        }
        for report, auto in found
    ]
    return {"machine": asdict(found.machine), "cases": cases, "findings": list(_findings(found))}


def _case_lines(machine: Machine, report: CaseReport, auto: str | None) -> Iterator[str]:
    note = f"  ({report.note})" if report.note else ""
    cached = "  [inputs stay in the cache]" if report.cached else ""
    yield f"{report.operation}  {report.label}{note}{cached}"
    if report.problem:
        yield f"  not measured: {report.problem}"
    for name in sorted(report.providers, key=ORDER.index):
        yield f"  {name:<10} {_figures(machine, report, name, report.providers[name])}"
    if report.baseline is not None:
        yield f"  {'baseline':<10} {_time(report.baseline.seconds):>12}  as the engine calls it, without copies"
    if auto is not None and machine.kind == "cuda":
        ratio = report.ratio(auto)
        yield f"  {'auto':<10} {auto}" + (f", {ratio:.2f}" if ratio is not None else "")


def _figures(machine: Machine, report: CaseReport, name: str, served: Served) -> str:
    if served.timing is None:
        return {"wrong": "FAILED: ", "error": "ERROR: ", "refused": "-  "}.get(served.state, "") + served.reason
    seconds, ratio = served.timing.seconds, report.ratio(name)
    share = machine.ceilings.floor(report.bytes, report.flops) / seconds
    how = "" if served.timing.how in ("CUDA graph", "host clock") else f"  {served.timing.how}"
    return (
        f"{_time(seconds):>12} {report.bytes / seconds / 1e9:>8,.0f} {report.flops / seconds / 1e12:>9,.2f} "
        f"{share:>9.1%} {'' if ratio is None else f'{ratio:.2f}':>10}{how}"
    )


def _findings(found: Found) -> Iterator[str]:
    """What makes the run a failed one."""
    for name, why in found.broken.items():
        yield f"INCOMPLETE  {name}: {why}"
    for report, auto in found:
        case = f"{report.operation}  {report.label}"
        if report.problem and not report.problem.startswith("too large for a CPU"):
            yield f"NOT MEASURED  {case}: {report.problem}"
        for name, served in report.providers.items():
            if served.state in ("wrong", "error"):
                yield f"{'FAILED' if served.state == 'wrong' else 'ERROR'}  {case}: {name}: {served.reason}"
        ratio = report.ratio(auto)
        if ratio is not None and ratio < SLOWEST:
            yield f"SLOWER  {case}: auto takes {auto}, which is {ratio:.2f} times as fast as the engine"


def _brief(report: CaseReport) -> str:
    if report.problem:
        return report.problem
    parts: list[str] = []
    for name in sorted(report.providers, key=ORDER.index):
        served = report.providers[name]
        if served.state != "refused":
            parts.append(f"{name} {_time(served.timing.seconds) if served.timing else served.state.upper()}")
    return "  ".join(parts) or "no provider serves it"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"


def _selected(cases: Sequence[Key], arguments: argparse.Namespace) -> list[Key]:
    filters: list[str] = arguments.filters
    known = {name for key in cases for name in (key.family, key.operation)}
    for one in filters:
        if one not in known:
            near = settings.nearest(one, known)
            raise CommandError(
                f"no operator has cases under the name {one!r}" + (f"; did you mean {near}?" if near else ".")
            )
    found = [key for key in cases if not filters or {key.family, key.operation} & set(filters)]
    found = [key for key in found if fnmatch.fnmatchcase(key.label, arguments.case)]
    if not found:
        raise CommandError(f"no case's label matches {arguments.case!r}.")
    return found


def _warm(setup: Setup, keys: Sequence[Key]) -> None:
    from atom_patches.kernels import suite

    workers = min(16, os.cpu_count() or 1, len(keys))
    _progress(f"compiling for {len(keys)} cases in {workers} processes")
    for number, (key, problem) in enumerate(suite.warm(setup, keys, workers), 1):
        _progress(f"[{number}/{len(keys)}] {key.operation}  {key.label}  {problem or 'compiled'}")


def _write(path: Path | None, found: Found) -> None:
    if path is not None:
        path.write_text(json.dumps(document(found), indent=1) + "\n", encoding="utf-8")


def _draw(path: Path, found: Found) -> None:
    from atom_patches.cli import bench_picture

    try:
        bench_picture.draw(path, found.machine, list(found))
    except bench_picture.NoPicture as error:
        _progress(str(error))


def _providers(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in ORDER]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no provider; they are {', '.join(ORDER)}")
    return names


def _asked(arguments: argparse.Namespace) -> tuple[str, ...]:
    names: tuple[str, ...] = arguments.providers
    return ("torch",) if arguments.device == "cpu" else tuple(name for name in ORDER if name in names)


def _engine(arguments: argparse.Namespace) -> str | None:
    """The engine whose kernels are compared with: the one asked for, else the installed one."""
    if arguments.engine == "none" or arguments.device == "cpu":
        return None
    for name in arming.ENGINES if arguments.engine is None else (arguments.engine,):
        if importlib.util.find_spec(name) is not None:
            return name
    if arguments.engine is not None:
        raise CommandError(f"{arguments.engine} is not installed in this environment.")
    return None


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
