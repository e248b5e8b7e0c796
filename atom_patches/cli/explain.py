"""`explain ID`: why a patch exists, what it needs, and whether the installed source is the one it was written for."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atom_patches.cli import catalogue
from atom_patches.core import drift, reviewed, settings, source
from atom_patches.core.engine import Engine
from atom_patches.core.patch import Patch, Target

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands

KINDS = {
    "bootstrap": "bootstrap: always on; hands the engine's configuration over",
    "correctness": "correctness: if its condition holds and it cannot be applied, the launch stops",
    "optimisation": "optimisation: if it cannot be applied, the engine runs as it does without it",
}


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "explain",
        "one patch: why, how, gates, and what changed upstream",
        examples=[
            ("explain vllm.pcp.block_table", "one patch"),
            ("explain vllm.dp_idle.post_step", "with the change upstream that it waits for"),
            ("explain sglang.sparse_mla --json", "a whole feature, for a script"),
        ],
    )
    parser.add_argument("id", metavar="ID", help="a patch's id, or a group's name for all its members")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a patch")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print everything about one patch, or about each member of a group."""
    engine, patches = catalogue.find(arguments.id)
    installed = catalogue.installed(engine)
    if arguments.json:
        print(json.dumps([_plain(installed, patch) for patch in patches], indent=1))
    else:
        print("\n\n".join("\n".join(_lines(installed, patch)) for patch in patches))
    return 0


def _plain(installed: catalogue.Installed, patch: Patch) -> dict[str, Any]:
    standing = catalogue.standing(installed, patch)
    sources = reviewed.installed(patch) if installed.location is not None and patch.kind != "bootstrap" else []
    return {
        "id": patch.id,
        "documentation": catalogue.documentation(installed.engine, patch),
        **dict(_facts(patch)),
        "state": standing.state.value,
        "reason": standing.reason,
        "details": catalogue.details(installed.engine, patch) if installed.location is not None else [],
        "sources": [line.strip() for target in sources for line in _source_lines(installed.engine, patch, target)],
    }


def _lines(installed: catalogue.Installed, patch: Patch) -> Iterator[str]:
    yield patch.id
    yield textwrap.indent(catalogue.documentation(installed.engine, patch), "  ")
    yield ""
    for name, value in _facts(patch):
        yield f"  {name:<10} {value}"
    standing = catalogue.standing(installed, patch)
    yield f"  {'here':<10} {standing.state}: {standing.reason}"
    if installed.location is not None and (details := catalogue.details(installed.engine, patch)):
        yield ""
        yield from (f"  {line}" for line in details)
    if installed.location is not None and patch.kind != "bootstrap":
        yield ""
        yield "  source, as installed"
        for target in reviewed.installed(patch):
            yield from _source_lines(installed.engine, patch, target)


def _facts(patch: Patch) -> Iterator[tuple[str, str]]:
    yield "target", patch.target
    yield "kind", KINDS[patch.kind]
    if patch.group is not None:
        yield "group", f"{patch.group}: applied whole or not at all"
    yield "supports", patch.supports
    if patch.when is not None:
        yield "when", _condition(patch)
    if patch.kind != "bootstrap":
        variable = settings.feature_variable(patch.feature)
        yield "switch", f"{variable}, now {os.environ.get(variable) or 'auto'}"
    if patch.changes_graph:
        yield "compiled", "changes compiled graphs, so it enters the compile-cache key while it is active"
    yield "upstream", patch.upstream or "not stated"


def _condition(patch: Patch) -> str:
    text = inspect.getdoc(patch.when) if patch.when is not None else None
    summary = (text or "").partition("\n")[0]
    return summary or "decided from the engine's configuration"


def _source_lines(engine: Engine, patch: Patch, target: Target) -> Iterator[str]:
    try:
        lines = drift.current_lines(target)
    except source.SourceError as error:
        yield f"    {target}: gone: {error}"
        return
    known = reviewed.fingerprints(engine, target, patch)
    current = drift.fingerprint(lines)
    same = [version for version, one in known.items() if one.hash == current.hash]
    yield f"    {target}  {current.hash}  {_verdict(same, list(known))}"
    if not same:
        yield from (f"      {change}" for change in drift.diff(list(known.values()), lines))


def _verdict(same: list[str], known: list[str]) -> str:
    if same:
        return f"as reviewed in {', '.join(same)}"
    return f"changed since {', '.join(known)}" if known else "never reviewed"
