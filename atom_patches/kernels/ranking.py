"""From measured times to the table that `auto` reads: `measured/<GPU>/<engine>.json`, a ranking per shape class.

    {"gpu": ..., "engine": ..., "runs": [{"date", "versions", "ceilings"}, ...],
     "ranking": {operator: {shape class: [provider, ...]}},              the fastest first
     "evidence": {operator: {shape class: {"run": index into runs, "microseconds": {case: {provider: ...}}}}}}
    where "baseline" stands for the engine's own call, if that does less than the operator promises.

A run replaces the classes that it measured and leaves the others alone.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from atom_patches.kernels.results import CaseReport, Machine

SLACK = 0.99
"""A provider that is less than this times as fast as the engine in any case of a class comes after the engine."""


def rank(reports: Sequence[CaseReport]) -> list[str]:
    """The providers of one shape class, the fastest first; those that were wrong or failed somewhere are left out.

    Args:
        reports: the cases of the class. With several, what counts is the geometric mean of the times relative to each
            case's fastest, once no case is left slower than with the engine's own kernel.
    """
    names = [name for name in _names(reports) if not any(_failed(report, name) for report in reports)]
    return sorted(names, key=lambda name: (_loses(reports, name), _relative(reports, name)))


def updated(table: dict[str, Any], machine: Machine, reports: Iterable[CaseReport]) -> dict[str, Any]:
    """`table`, or {}, with the classes that this run measured."""
    runs: list[dict[str, Any]] = list(table.get("runs", []))
    ranking: dict[str, dict[str, list[str]]] = {op: dict(found) for op, found in table.get("ranking", {}).items()}
    evidence: dict[str, dict[str, Any]] = {op: dict(found) for op, found in table.get("evidence", {}).items()}
    for (operation, shape), members in _classes(reports).items():
        ranking.setdefault(operation, {})[shape] = rank(members)
        times = {report.label: _microseconds(report) for report in members}
        evidence.setdefault(operation, {})[shape] = {"run": len(runs), "microseconds": times}
    runs.append(_run(machine))
    names = {"gpu": machine.device, "engine": machine.engine}
    return names | {"ranking": _sorted(ranking)} | _without_unused(runs, evidence)


def record(machine: Machine, reports: Iterable[CaseReport]) -> Path:
    """Write the measured table of the machine's GPU and engine; returns the file."""
    from atom_patches.kernels import registry

    path = registry.measured_file(machine.device, machine.engine or "none")
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(updated(table, machine, reports), indent=1) + "\n", encoding="utf-8")
    return path


def automatic(reports: Sequence[CaseReport]) -> list[str | None]:
    """Whom `auto` takes in each case once these reports are recorded: the first in the ranking that can serve it."""
    rankings = {key: rank(members) for key, members in _classes(reports).items()}
    found: list[str | None] = []
    for report in reports:
        ranking = rankings.get((report.operation, report.shape_class), [])
        found.append(next((name for name in ranking if report.seconds(name) is not None), report.auto))
    return found


def _classes(reports: Iterable[CaseReport]) -> dict[tuple[str, str], list[CaseReport]]:
    found: dict[tuple[str, str], list[CaseReport]] = {}
    for report in reports:
        if any(served.timing for served in report.providers.values()):
            found.setdefault((report.operation, report.shape_class), []).append(report)
    return found


def _names(reports: Sequence[CaseReport]) -> list[str]:
    names = {name: None for report in reports for name in report.providers if report.seconds(name) is not None}
    return list(names)


def _failed(report: CaseReport, name: str) -> bool:
    served = report.providers.get(name)
    return served is not None and served.state in ("wrong", "error")


def _loses(reports: Sequence[CaseReport], name: str) -> bool:
    pairs = [(report.seconds(name), report.seconds("engine")) for report in reports]
    return any(own is not None and engine is not None and engine / own < SLACK for own, engine in pairs)


def _relative(reports: Sequence[CaseReport], name: str) -> float:
    logs: list[float] = []
    for report in reports:
        own = report.seconds(name)
        others = [seconds for other in report.providers if (seconds := report.seconds(other)) is not None]
        if own is not None:
            logs.append(math.log(own / min(others)))
    return sum(logs) / len(logs)


def _microseconds(report: CaseReport) -> dict[str, float]:
    times = {name: report.seconds(name) for name in report.providers}
    if report.baseline is not None:
        times["baseline"] = report.baseline.seconds
    return {name: round(seconds * 1e6, 2) for name, seconds in times.items() if seconds is not None}


def _run(machine: Machine) -> dict[str, Any]:
    ceilings = machine.ceilings
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": dict(machine.versions),
        "ceilings": {"bytes_per_second": ceilings.bandwidth, "flops_per_second": ceilings.rate, "how": ceilings.how},
    }


def _without_unused(runs: list[dict[str, Any]], evidence: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The runs that evidence still refers to, renumbered."""
    used = sorted({one["run"] for found in evidence.values() for one in found.values()})
    for found in evidence.values():
        for shape, one in found.items():
            found[shape] = one | {"run": used.index(one["run"])}
    return {"runs": [runs[i] for i in used], "evidence": _sorted(evidence)}


def _sorted(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {operation: dict(sorted(found.items())) for operation, found in sorted(table.items())}
