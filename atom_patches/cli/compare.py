"""`compare -- COMMAND`: a server without the overlay and with it, asked the same: answers, log-probabilities, speed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from atom_patches.cli import CommandError, compare_prompts
from atom_patches.cli import run as launching

if TYPE_CHECKING:
    from atom_patches.bench.answers import Answer
    from atom_patches.bench.client import Client, Prompt
    from atom_patches.bench.server import Server
    from atom_patches.cli.parsing import Commands

OURS = ("--model-impl", "--prefill-context-parallel-size", "-pcp")
"""Options that a stock engine refuses, or some of whose values it does."""

REACHABLE = ("127.0.0.1", "localhost", "0.0.0.0")


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "compare",
        "serve a model without the overlay and with it, and compare: compare -- vllm serve ...",
        "Start the server twice, one after the other: stock (ATOM_PATCHES=0), then with the overlay. Ask both the same "
        "prompts, greedily; compare tokens and log-probabilities up to the first token that differs, and the tokens "
        "generated a second. Exit status: 0 equal but for rounding, 1 different, or the overlay did nothing.",
        [
            ("compare -- vllm serve MODEL --max-model-len 4096", "ATOM decoders in vLLM"),
            ("compare --report out.html -- python -m sglang.launch_server --model-path MODEL", "in SGLang, a page"),
            (
                "compare --overlay '--prefill-context-parallel-size 2' --prompts prompts.txt -- vllm serve MODEL",
                "two GPUs beside one, prompts of your own",
            ),
        ],
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help='a prompt a line, or .jsonl: {"prompt": a text or token ids}'
    )
    parser.add_argument("--new", type=_count, default=64, metavar="N", help="tokens of each answer (64)")
    parser.add_argument("--at-once", type=_count, default=8, metavar="N", help="requests in flight (8)")
    parser.add_argument(
        "--repeats", type=_count, default=6, metavar="N", help="how often speed is measured; an interval takes 6 (6)"
    )
    parser.add_argument(
        "--tolerance",
        type=_amount,
        default=0.15,
        metavar="X",
        help="how far log-probabilities may be apart, where tokens first differ those of both tokens (0.15, for "
        "bfloat16)",
    )
    parser.add_argument(
        "--overlay",
        default="",
        metavar="WORDS",
        help="options and VARIABLE=value for the second server alone; without any, and without ATOM_MODELS in the "
        "environment, ATOM_MODELS=1",
    )
    parser.add_argument("--start-limit", type=_amount, default=900, metavar="SECONDS", help="for each start (900)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page with pictures, one file by itself")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("command", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="what starts the server")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve, ask, compare, print; 1 if something is different."""
    from atom_patches.bench.client import AnswerError
    from atom_patches.bench.server import ServerError
    from atom_patches.cli import compare_report

    plan = _plan(arguments)
    if arguments.report is not None and not arguments.report.absolute().parent.is_dir():
        raise CommandError(f"--report {arguments.report}: there is no such directory.")
    with _logs(arguments.logs) as folder, _ending_on_sigterm():
        try:
            stock, overlay = (_served(plan, side, folder, arguments.start_limit) for side in plan.sides())
        except (AnswerError, ServerError) as error:
            kept = f"\nThe logs are in {folder}." if arguments.logs else ""
            raise CommandError(f"{error}{kept}") from error
    found = compare_report.document(plan.about(), plan.prompts, stock, overlay, arguments.tolerance)
    print(json.dumps(found, indent=1) if arguments.json else compare_report.text(found))
    if arguments.report is not None:
        arguments.report.write_text(compare_report.page(found), encoding="utf-8")
    return 1 if found["findings"] else 0


# The plan


@dataclass(frozen=True)
class Side:
    """One of the two servers: its name, its command, and the variables that differ from this process's."""

    name: str
    command: list[str]
    variables: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """What is asked of whom."""

    program: str
    command: list[str]
    options: list[str]
    variables: dict[str, str]
    prompts: list[Prompt]
    new: int
    at_once: int
    repeats: int

    def sides(self) -> tuple[Side, Side]:
        """Stock, and the overlay."""
        ours = {"ATOM_PATCHES": "1", **self.variables}
        return (
            Side("stock", self.command, {"ATOM_PATCHES": "0"}),
            Side("overlay", [*self.command, *self.options], ours),
        )

    def about(self) -> dict[str, Any]:
        """What was compared, as plain data."""
        alone = [*(f"{name}={value}" for name, value in self.variables.items()), *self.options]
        return {
            "command": shlex.join(self.command),
            "overlay": shlex.join(alone),
            "new": self.new,
            "at_once": self.at_once,
        }


@dataclass(frozen=True)
class Served:
    """What one server answered, how many tokens a second in each round, and its processes as `status` has them."""

    answers: list[Answer]
    speeds: list[float]
    processes: list[dict[str, Any]]


def _plan(arguments: argparse.Namespace) -> Plan:
    """What was asked for.

    Raises:
        CommandError: it cannot be done; nothing was started.
    """
    given: list[str] = arguments.command
    command = given[1:] if given[:1] == ["--"] else given
    if not command:
        raise CommandError("compare needs a server's command: python -m atom_patches compare -- vllm serve MODEL")
    if command[0].endswith(".json"):
        raise CommandError(f"{command[0]} is no server's command; two files of `bench` are for `bench compare`.")
    program = shutil.which(command[0])
    if program is None:
        raise CommandError(f"there is no command {command[0]!r} on the PATH.")
    if os.environ.get("ATOM_PATCHES") == "0":
        raise CommandError("ATOM_PATCHES=0 keeps everything off, in the second server, too. Unset it.")
    for word in command:
        if word.partition("=")[0] in OURS:
            raise CommandError(
                f"{word} is the overlay's, and the stock server would refuse it: give it as --overlay '{word} …'."
            )
    launching.preflight()
    launching.check_interpreter(program)
    try:
        words = shlex.split(arguments.overlay)
    except ValueError as error:
        raise CommandError(f"--overlay {arguments.overlay}: {error}.") from error
    variables = dict(word.split("=", 1) for word in words if _is_variable(word))
    options = [word for word in words if not _is_variable(word)]
    if not words and not os.environ.get("ATOM_MODELS"):
        variables = {"ATOM_MODELS": "1"}
    return Plan(
        program, command, options, variables, compare_prompts.read(arguments.prompts), arguments.new, arguments.at_once,
        arguments.repeats,
    )  # fmt: skip


def _is_variable(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier() and name.isupper()


# The servers


def _served(plan: Plan, side: Side, folder: Path, limit: float) -> Served:
    """Start one of the servers, ask it everything, and end it."""
    from atom_patches.bench import client, server

    states = folder / f"{side.name}.states"
    states.mkdir(mode=0o700, exist_ok=True)
    words, port = _with_port(plan.program, side.command)
    variables = {**os.environ, **side.variables, "ATOM_PATCHES_STATE_DIR": str(states)}
    _progress(f"{side.name}: starting")
    with server.running(side.name, words, port, variables, folder) as started:
        started.wait(lambda: None, limit)
        _progress(f"{side.name}: answers")
        asked = client.Client(started.url, plan.new, plan.at_once)
        answers = asked.answers(plan.prompts)
        speeds = list(_speeds(plan, asked, side.name))
        started.check()
        return Served(answers, speeds, _processes(started))


def _speeds(plan: Plan, asked: Client, name: str) -> Iterator[float]:
    from atom_patches.bench import client

    for number in range(plan.repeats):
        found = asked.speed(client.shifted(plan.prompts, number + 1))
        _progress(f"{name}: round {number + 1} of {plan.repeats}, {found:,.1f} tokens/s")
        yield found


def _processes(started: Server) -> list[dict[str, Any]]:
    return started.status()["processes"]


def _with_port(program: str, command: Sequence[str]) -> tuple[list[str], int]:
    """The command, with a free port if it names none, and its port.

    Raises:
        CommandError: nothing can listen, or be asked, there.
    """
    from atom_patches.bench import server

    words = [program, *command[1:]]
    host = _option(words, "--host")
    if host not in (None, *REACHABLE):
        raise CommandError(f"--host {host}: the server is asked on this machine; leave it out, or take 127.0.0.1.")
    given = _option(words, "--port")
    if given is None:
        port = server.free_port()
        return [*words, "--port", str(port)], port
    if not given.isdigit() or not server.is_free(int(given)):
        raise CommandError(f"--port {given}: not a port that is free; leave it out for one that is.")
    return words, int(given)


def _option(words: Sequence[str], option: str) -> str | None:
    """The value of an option in a command; None if it is not there."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return None


@contextlib.contextmanager
def _logs(asked: Path | None) -> Generator[Path]:
    """A folder for logs and state files, which only the user can enter; gone afterwards if nobody asked for it."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        yield asked.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="atom_patches_compare_") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _ending_on_sigterm() -> Generator[None]:
    """Let a SIGTERM end the servers, too."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is needed")
    return int(text)


def _amount(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number, 0 or above, is needed")
    return found


BEGAN = time.monotonic()


def _progress(line: str) -> None:
    print(f"[{time.monotonic() - BEGAN:.0f} s] {line}", file=sys.stderr, flush=True)
