"""`status`: what is installed, where each patch stands, and what running processes say about themselves."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom_patches import __version__
from atom_patches.cli import catalogue, colour
from atom_patches.core import report, settings
from atom_patches.core.patch import Patch, State

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands

WIDTH = 110

COLOURS: dict[str, colour.Colour] = {
    "applied": "green",
    "pending": "cyan",
    "upstreamed": "cyan",
    "inactive": "grey",
    "off": "grey",
    "unsupported": "grey",
}
"""Of states; whatever needs a person's attention is red, and names its patches."""

ATTENTION = "red"


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "status",
        "installed engines, declared patches, running processes",
        "What is installed, how each patch fits it, and what running engines are patched with. Colours only on a "
        "terminal, and not with NO_COLOR.",
        [
            ("status", "features at a glance"),
            ("status --all", "every patch by name"),
            ("status --json", "for a script"),
        ],
    )
    parser.add_argument("--all", action="store_true", help="name every patch, also where a whole feature stands alike")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; always 0 if it could be found out."""
    found = gather()
    paint = colour.painter(sys.stdout)
    print(json.dumps(found, indent=1) if arguments.json else render(found, arguments.all, paint))
    return 0


def gather() -> dict[str, Any]:
    """The whole status as plain data, in the form that `--json` prints.

    Raises:
        StateDirError: the processes' state files cannot be trusted.
    """
    installed = [catalogue.installed(engine) for engine in catalogue.engines()]
    return {
        "atom_patches": {"version": __version__, "location": str(Path(__file__).parent.parent)},
        "engines": [_engine(found) for found in installed],
        "patches": [_patch(found, patch) for found in installed for patch in catalogue.patches(found.engine)],
        "processes": [_process(process) for process in report.processes()],
    }


def render(status: dict[str, Any], every: bool = False, paint: colour.Paint = colour.plain) -> str:
    """The status as text; `every` names each patch, also where a whole feature stands alike."""
    grouped = functools.partial(_grouped, every=every, paint=paint)
    ours = status["atom_patches"]
    lines = [f"atom_patches {ours['version']}  {ours['location']}", "", "engines"]
    for engine in status["engines"]:
        if engine["location"] is None:
            lines.append(f"  {engine['name']}  not installed")
        else:
            lines.append(f"  {engine['name']} {engine['version']}  {engine['location']}")
    lines += ["", "patches, in this environment", *grouped(status["patches"], indent="  ")]
    lines += ["", "processes"]
    for process in status["processes"]:
        lines += [*_process_lines(process), *grouped(process["patches"], indent="    ")]
    if not status["processes"]:
        lines.append("  none that was handed an engine's configuration")
    return "\n".join(lines)


def _engine(found: catalogue.Installed) -> dict[str, Any]:
    present = found.location is not None
    return {
        "name": found.engine.name,
        "installed": present,
        "version": found.version if present else None,
        "distribution": found.distribution or None,
        "location": str(found.location) if present else None,
    }


def _patch(found: catalogue.Installed, patch: Patch) -> dict[str, Any]:
    standing = catalogue.standing(found, patch)
    return {
        "id": patch.id,
        "engine": found.engine.name,
        "feature": patch.feature,
        "variable": None if patch.kind == "bootstrap" else settings.feature_variable(patch.feature),
        "kind": patch.kind,
        "target": patch.target,
        "supports": patch.supports,
        "state": standing.state.value,
        "reason": standing.reason,
    }


def _process(process: report.ProcessReport) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "roles": list(process.roles),
        "title": process.title,
        "engine": process.engine,
        "version": process.version,
        "config": dict(process.config),
        "notes": list(process.notes),
        "patches": [{"id": p.id, "state": p.state, "reason": p.reason} for p in process.patches],
        "kernels": [{"operation": k.operation, "provider": k.provider, "reason": k.reason} for k in process.kernels],
    }


def _process_lines(process: dict[str, Any]) -> list[str]:
    roles = ", ".join(process["roles"])
    lines = [f"  {process['pid']}  {roles}  ({process['engine']} {process['version']})  {process['title'][:80]}"]
    config = " ".join(f"{name}={value}" for name, value in process["config"].items())
    if config:
        lines.append(f"    {config}")
    return lines + [f"    note: {note}" for note in process["notes"]]


def _grouped(patches: list[dict[str, Any]], indent: str, every: bool, paint: colour.Paint) -> list[str]:
    """Patches with the same state for the same reason share one entry."""
    alike: dict[tuple[str, str], list[str]] = {}
    for patch in patches:
        alike.setdefault((patch["state"], _brief(patch)), []).append(patch["id"])
    lines: list[str] = []
    for (state, reason), ids in alike.items():
        lines.append(f"{indent}{paint(f'{state:<11}', COLOURS.get(state, ATTENTION))}  {reason}")
        names = ids if every or COLOURS.get(state, ATTENTION) == ATTENTION else _features(ids)
        lines += textwrap.wrap(
            ", ".join(names), WIDTH, initial_indent=f"{indent}{'':<13}", subsequent_indent=f"{indent}{'':<13}"
        )
    return lines or [f"{indent}none"]


def _brief(patch: dict[str, Any]) -> str:
    """Why a patch stands where it does, in one line: where an unreviewed release differs is for `explain`."""
    reason: str = patch["reason"]
    if patch["state"] != State.UNSUPPORTED.value:
        return reason
    return f"{reason.partition(', and ')[0]}, and its source is another: see `python -m atom_patches explain ID`"


def _features(ids: list[str]) -> list[str]:
    """One name a feature, with the number of its patches; a single patch by its own name."""
    by_feature: dict[str, list[str]] = {}
    for one in ids:
        by_feature.setdefault(one.rpartition(".")[0], []).append(one)
    return [f"{name} ({len(mine)} patches)" if len(mine) > 1 else mine[0] for name, mine in by_feature.items()]
