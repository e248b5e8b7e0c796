"""The command line: one module per command, with `add_to(commands)` and `run(arguments) -> exit status`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


class CommandError(Exception):
    """A command cannot do what was asked; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 fine, 1 problems or refused, 2 wrong usage."""
    from atom_patches import __version__
    from atom_patches.cli import accept, bench, bench_pcp, doctor, explain, run, status
    from atom_patches.core.patch import PatchError
    from atom_patches.core.report import StateDirError
    from atom_patches.core.settings import SettingsError

    parser = argparse.ArgumentParser(
        prog="python -m atom_patches", description="In-memory patches for unmodified vLLM and SGLang."
    )
    parser.add_argument("--version", action="version", version=f"atom_patches {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (status, doctor, explain, accept, run, bench, bench_pcp):
        command.add_to(commands)
    parsed = parser.parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CommandError, PatchError, SettingsError, StateDirError) as error:
        print(f"atom_patches: {error}", file=sys.stderr)
        return 1


def _joined(arguments: Sequence[str]) -> list[str]:
    """`bench pcp` is a command of its own, written as two words."""
    first = list(arguments[:2])
    return [" ".join(first), *arguments[2:]] if first == ["bench", "pcp"] else list(arguments)
