"""The command line: one module per command, with `add_to(commands)` and `run(arguments) -> exit status`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands, Parser

TEXT = """\
In-memory patches for unmodified vLLM and SGLang.

An engine is patched when it is started with VLLM_PLUGINS=atom (vLLM) or SGLANG_PLUGINS=atom (SGLang), and then only
where its options ask for what it cannot do itself. These commands look at that; none of them changes an engine."""

EXAMPLES = (
    ("status", "what is installed, and what running engines are patched with"),
    ("doctor", "what is wrong with this set-up, and what to do"),
    ("explain vllm.pcp", "a feature: why each patch exists, and what it stands on"),
    ("run -- vllm serve MODEL --prefill-context-parallel-size 2", "check, arm and launch"),
    ("compare -- vllm serve MODEL", "the same server without the overlay and with it, asked the same"),
    ("bench fused_moe --html report.html", "kernels beside the engine's, on this GPU"),
)


class CommandError(Exception):
    """A command cannot do what was asked; the message says why and what to do."""


def parsers() -> tuple[Parser, Commands]:
    """The command line's parser, and those of its commands."""
    from atom_patches import __version__
    from atom_patches.cli import (
        accept,
        bench,
        bench_compare,
        bench_engine,
        bench_pcp,
        compare,
        completion,
        doctor,
        explain,
        new,
        run,
        status,
    )
    from atom_patches.cli.parsing import PROGRAM, Commands, Parser

    parser = Parser(prog=PROGRAM, description=TEXT, examples=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"atom_patches {__version__}")
    commands = Commands(parser)
    for command in (
        status,
        doctor,
        explain,
        accept,
        run,
        compare,
        bench,
        bench_engine,
        bench_pcp,
        bench_compare,
        new,
        completion,
    ):
        command.add_to(commands)
    return parser, commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 fine, 1 problems or refused, 2 wrong usage."""
    from atom_patches.core.patch import PatchError
    from atom_patches.core.report import StateDirError
    from atom_patches.core.settings import SettingsError

    parser, commands = parsers()
    words = _joined(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help()
        return 2
    commands.check(words)
    parsed, rest = parser.parse_known_args(words)
    if rest:
        commands.by_name[parsed.name].misspelt(rest)
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
    """Some commands are written as two words."""
    first = list(arguments[:2])
    two = first in (["bench", "engine"], ["bench", "pcp"], ["bench", "compare"], ["new", "patch"], ["new", "kernel"])
    return [" ".join(first), *arguments[2:]] if two else list(arguments)
