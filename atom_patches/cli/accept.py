"""`accept ID`: record that the installed source of a patch's targets was read, and that the patch still fits it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from atom_patches.cli import CommandError, catalogue
from atom_patches.core import reviewed, settings
from atom_patches.core.patch import Patch
from atom_patches.core.source import SourceError

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "accept",
        "record a reviewed upstream source, so that a drifted patch applies",
        "Record that the installed source of a patch's targets was read and that the patch still fits it: read "
        "`explain` first.",
        [("explain vllm.pcp.block_table", "what changed upstream"), ("accept vllm.pcp.block_table", "it still fits")],
    )
    parser.add_argument("id", metavar="ID", help="a patch's id, or a group's name for all its members")
    parser.add_argument(
        "--ship", action="store_true", help="write into the package instead of your own file (for developers)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Record the source and say where."""
    engine, patches = catalogue.find(arguments.id)
    installed = catalogue.installed(engine)
    if installed.location is None:
        raise CommandError(f"{engine.name} is not installed in this environment, so there is no source to accept.")
    try:
        if arguments.ship:
            file = reviewed.ship(engine, patches, installed.version)
            accepted = list(dict.fromkeys(str(target) for patch in patches for target in reviewed.installed(patch)))
        else:
            accepted = [str(target) for target in reviewed.accept(engine, patches, installed.version)]
            file = settings.accepted_file()
    except SourceError as error:
        raise CommandError(f"{arguments.id} cannot be accepted: {error}. {_advice(patches)}") from error
    release = f"{engine.name} {installed.version}"
    if arguments.json:
        print(json.dumps({"id": arguments.id, "release": release, "file": str(file), "accepted": accepted}, indent=1))
    else:
        print(_told(arguments.id, release, str(file), accepted, arguments.ship))
    return 0


def _told(name: str, release: str, file: str, accepted: list[str], shipped: bool) -> str:
    if shipped:
        return f"{name}: the source in {release} is recorded in {file}"
    if not accepted:
        return f"{name}: the source in {release} was reviewed already; nothing to accept"
    return "\n".join(
        [f"{name}: accepted the source in {release}, recorded in {file}", *(f"  {target}" for target in accepted)]
    )


def _advice(patches: Iterable[Patch]) -> str:
    supported = ", ".join(sorted({patch.supports for patch in patches}))
    return f"The patch needs what is missing: install {supported}, or a release of atom_patches that fits."
