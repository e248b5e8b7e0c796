"""`status`: what is installed, where each patch stands, and what running processes say about themselves."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from atom_patches import __version__
from atom_patches.cli import catalogue
from atom_patches.core import report, settings
from atom_patches.core.patch import Patch

WIDTH = 110


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("status", help="installed engines, declared patches, running processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; always 0 if it could be found out."""
    found = gather()
    print(json.dumps(found, indent=1) if arguments.json else render(found))
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


def render(status: dict[str, Any]) -> str:
    """The status as text."""
    ours = status["atom_patches"]
    lines = [f"atom_patches {ours['version']}  {ours['location']}", "", "engines"]
    for engine in status["engines"]:
        if engine["location"] is None:
            lines.append(f"  {engine['name']}  not installed")
        else:
            lines.append(f"  {engine['name']} {engine['version']}  {engine['location']}")
    lines += ["", "patches, in this environment", *_grouped(status["patches"], indent="  ")]
    lines += ["", "processes"]
    for process in status["processes"]:
        lines += _process_lines(process)
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
    lines += [f"    note: {note}" for note in process["notes"]]
    return lines + _grouped(process["patches"], indent="    ")


def _grouped(patches: list[dict[str, Any]], indent: str) -> list[str]:
    """Patches with the same state for the same reason share one entry."""
    alike: dict[tuple[str, str], list[str]] = {}
    for patch in patches:
        alike.setdefault((patch["state"], patch["reason"]), []).append(patch["id"])
    lines: list[str] = []
    for (state, reason), ids in alike.items():
        lines.append(f"{indent}{state:<11}  {reason}")
        lines += textwrap.wrap(
            ", ".join(ids), WIDTH, initial_indent=f"{indent}{'':<13}", subsequent_indent=f"{indent}{'':<13}"
        )
    return lines or [f"{indent}none"]
