"""`run -- COMMAND`: arm, check, and become the command."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atom_patches.cli import CommandError, doctor

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "run",
        "arm, check, and launch: run -- vllm serve ...",
        "Check the environment, set ATOM_PATCHES=1 and become the command. Nothing is started if something is wrong.",
        [
            ("run -- vllm serve MODEL --prefill-context-parallel-size 2", "vLLM"),
            ("run -- python -m sglang.launch_server --model-path MODEL", "SGLang"),
            ("run -- python script.py", "a script of your own"),
        ],
    )
    parser.add_argument("command", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the armed command; returns only by raising.

    Raises:
        CommandError: the command cannot be found, or would not run as asked.
    """
    command: list[str] = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise CommandError("run needs a command: python -m atom_patches run -- vllm serve MODEL")
    if os.environ.get("ATOM_PATCHES") == "0":
        raise CommandError("ATOM_PATCHES=0 keeps everything off, which `run` contradicts. Unset one of them.")
    program = shutil.which(command[0])
    if program is None:
        raise CommandError(f"there is no command {command[0]!r} on the PATH.")
    preflight()
    check_interpreter(program)
    os.environ["ATOM_PATCHES"] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, command)


def preflight() -> None:
    """Refuse what would keep the launch from doing what its environment asks for; mention the rest."""
    for finding in doctor.launch_checks():
        if finding.is_problem:
            raise CommandError(f"{finding.message}\nNothing was started.")
    for finding in doctor.engine_checks():
        if finding.is_problem:
            print(f"atom_patches: {finding.message}", file=sys.stderr)


def check_interpreter(program: str) -> None:
    """Refuse a Python that does not arm itself: it would run unpatched without a word."""
    interpreter = _interpreter(Path(program))
    if interpreter is None:
        return
    code = "import sys; sys.exit('atom_patches' not in sys.modules)"
    armed = subprocess.run([interpreter, "-c", code], env={**os.environ, "ATOM_PATCHES": "1"}, check=False)
    if armed.returncode:
        raise CommandError(
            f"{program} runs {interpreter}, where atom_patches is not installed and would not be applied.\n"
            f"Install it there ({interpreter} -m pip install atom-patches), or run a command of this environment: "
            f"{Path(sys.executable).parent}"
        )


def _interpreter(program: Path) -> str | None:
    """The Python that a command will run in, as far as its name or first line tells."""
    if program.name.startswith("python"):
        return str(program)
    with program.open("rb") as file:
        first = file.readline(4096)
    if not first.startswith(b"#!") or b"python" not in first:
        return None
    words = first[2:].decode(errors="replace").split()
    return shutil.which(words[-1] if Path(words[0]).name == "env" else words[0])
