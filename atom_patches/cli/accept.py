"""`accept ID`: record that the installed source of a patch's targets was read, and that the patch still fits it."""

from __future__ import annotations

import argparse
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
            print(f"{arguments.id}: the source in {engine.name} {installed.version} is recorded in {file}")
        else:
            accepted = reviewed.accept(engine, patches, installed.version)
            print(_told(arguments.id, f"{engine.name} {installed.version}", [str(target) for target in accepted]))
    except SourceError as error:
        raise CommandError(f"{arguments.id} cannot be accepted: {error}. {_advice(patches)}") from error
    return 0


def _told(name: str, version: str, accepted: list[str]) -> str:
    if not accepted:
        return f"{name}: the source in {version} was reviewed already; nothing to accept"
    listed = "\n".join(f"  {target}" for target in accepted)
    return f"{name}: accepted the source in {version}, recorded in {settings.accepted_file()}\n{listed}"


def _advice(patches: Iterable[Patch]) -> str:
    supported = ", ".join(sorted({patch.supports for patch in patches}))
    return f"The patch needs what is missing: install {supported}, or a release of atom_patches that fits."
