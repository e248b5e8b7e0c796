"""`bench compare BEFORE AFTER`: two runs of `bench`, case by case."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from atom_patches.cli import CommandError, bench_report

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands

Document = Mapping[str, Any]


class Pair(NamedTuple):
    """One provider in one case, in both runs."""

    case: str
    provider: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times as fast the second run was."""
        return self.before / self.after


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "bench compare",
        "compare two runs of `bench`",
        "Compare two files that `bench --json` wrote: how many times as fast each provider was in the second. Exit "
        "status: 0 fine, 1 a provider got slower than the limit, or is timed no more.",
        [
            ("bench compare before.json after.json", "what got faster or slower"),
            ("bench compare before.json after.json --html difference.html", "the same with plots, one file by itself"),
            ("bench compare before.json after.json --limit 0.9 --json", "a larger limit, for a script"),
        ],
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a file of `bench --json`")
    parser.add_argument("after", type=Path, metavar="AFTER", help="another one")
    parser.add_argument("--limit", type=float, default=0.95, metavar="RATIO", help="slower than this fails (0.95)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots, one file by itself")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what changed; 1 if something got worse."""
    before, after = _read(arguments.before), _read(arguments.after)
    pairs, findings = list(_pairs(before, after)), [*_other_machine(before, after)]
    if not pairs:
        raise CommandError(f"{arguments.before} and {arguments.after} have no timed case in common.")
    worse = [*_slower(pairs, arguments.limit), *_lost(before, after)]
    if arguments.json:
        print(json.dumps({"cases": [_plain(pair) for pair in pairs], "notes": findings, "worse": worse}, indent=1))
    else:
        print("\n".join([*_text(pairs), "", *findings, *(worse or ["nothing got worse"])]))
    if arguments.html is not None:
        arguments.html.write_text(_page(pairs, [*findings, *worse]), encoding="utf-8")
    return 1 if worse else 0


def _read(path: Path) -> Document:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _times(found)
        return found
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(f"{path}: not a file that `bench --json` wrote ({type(error).__name__}).") from error


def _times(document: Document) -> dict[tuple[str, str], float]:
    """Seconds of each case and provider."""
    return {
        (f"{case['operation']}  {case['label']}", provider): served["timing"]["seconds"]
        for case in document["cases"]
        for provider, served in case["providers"].items()
        if served["timing"] is not None
    }


def _pairs(before: Document, after: Document) -> Iterator[Pair]:
    old, new = _times(before), _times(after)
    for (case, provider), seconds in old.items():
        if (case, provider) in new:
            yield Pair(case, provider, seconds, new[case, provider])


def _other_machine(before: Document, after: Document) -> Iterator[str]:
    for what in ("device", "engine", "versions"):
        old, new = before["machine"][what], after["machine"][what]
        if old != new:
            yield f"note: another {what}: {_said(old)}, then {_said(new)}"


def _said(value: Any) -> str:
    return bench_report.versions(cast("dict[str, str]", value)) if isinstance(value, dict) else str(value)


def _slower(pairs: list[Pair], limit: float) -> Iterator[str]:
    for pair in pairs:
        if pair.ratio < limit:
            yield f"SLOWER  {pair.case}: {pair.provider} is {pair.ratio:.2f} times as fast as before"


def _lost(before: Document, after: Document) -> Iterator[str]:
    """Providers that were timed, in a case that was run again, and are not now."""
    again = {f"{case['operation']}  {case['label']}" for case in after["cases"]}
    for case, provider in _times(before).keys() - _times(after).keys():
        if case in again:
            yield f"LOST  {case}: {provider} is not timed any more"


def _plain(pair: Pair) -> dict[str, Any]:
    return {**pair._asdict(), "ratio": pair.ratio}


def _text(pairs: list[Pair]) -> Iterator[str]:
    yield f"  {'':<10} {'before':>12} {'after':>12} {'times as fast':>14}"
    case = ""
    for pair in pairs:
        if pair.case != case:
            case = pair.case
            yield case
        before, after = bench_report.time(pair.before), bench_report.time(pair.after)
        yield f"  {pair.provider:<10} {before:>12} {after:>12} {pair.ratio:>14.2f}"


def _page(pairs: list[Pair], findings: list[str]) -> str:
    by_case: dict[str, dict[str, float]] = {}
    for pair in pairs:
        by_case.setdefault(pair.case, {})[pair.provider] = pair.ratio
    rows = [
        (p.case, p.provider, bench_report.time(p.before), bench_report.time(p.after), f"{p.ratio:.2f}") for p in pairs
    ]
    return bench_report.html(
        "Two runs of the kernels",
        [
            bench_report.findings(findings, "Nothing got worse."),
            "<h2>Times as fast as before</h2>",
            bench_report.bars([bench_report.Group(case, ratios) for case, ratios in by_case.items()]),
            "<h2>Every case</h2>",
            bench_report.table(("case", "provider", "before", "after", "times as fast"), rows),
        ],
    )
