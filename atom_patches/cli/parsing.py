"""Parsers that teach: each command shows examples, and a misspelt word gets the nearest one that exists."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from atom_patches.core import settings

PROGRAM = "python -m atom_patches"

WIDTH = 100

Example = tuple[str, str]
"""Arguments, and what they do."""


class Parser(argparse.ArgumentParser):
    """A parser that knows its examples, and all of its options by name."""

    def __init__(self, *, examples: Iterable[Example] = (), **facts: Any) -> None:
        self.examples = tuple(examples)
        self.options: list[str] = []
        self.values: dict[str, tuple[str, ...]] = {}
        self.documented: list[tuple[str, str]] = []
        facts.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(epilog=_listed(self.examples), allow_abbrev=False, **facts)

    def _add_action(self, action: argparse.Action) -> argparse.Action:
        self.options += action.option_strings
        choices = tuple(map(str, action.choices or ()))
        self.values |= {name: choices for name in action.option_strings or (action.dest,)}
        if action.help and "--help" not in action.option_strings:
            self.documented.append((_written(action), action.help % {"default": action.default}))
        return super()._add_action(action)

    def misspelt(self, rest: Sequence[str]) -> NoReturn:
        """End with what is wrong with the first argument that nothing took, and what was probably meant."""
        first = rest[0].partition("=")[0]
        near = settings.nearest(first, self.options) if first.startswith("-") else None
        hint = f"; did you mean {near}?" if near else f"; see {self.prog} --help"
        self.exit(2, f"atom_patches: {self.prog} takes no {first}{hint}\n")


class Commands:
    """The commands of one parser, by name."""

    def __init__(self, parser: Parser) -> None:
        self._subparsers: Any = parser.add_subparsers(title="commands", metavar="COMMAND", dest="name")
        self.by_name: dict[str, Parser] = {}

    def add(self, name: str, help: str, description: str = "", examples: Iterable[Example] = ()) -> Parser:
        """Declare a command: one line for the list, a few for its own help, and examples."""
        told = textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", WIDTH, break_on_hyphens=False)
        parser: Parser = self._subparsers.add_parser(name, help=help, description=told, examples=examples)
        self.by_name[name] = parser
        return parser

    def check(self, arguments: Sequence[str]) -> None:
        """End the program if the first word is no command."""
        word = next((one for one in arguments if not one.startswith("-")), None)
        if word is None or word in self.by_name:
            return
        near = settings.nearest(word, self.by_name)
        hint = f"; did you mean {near}?" if near else f"; the commands are {', '.join(self.by_name)}"
        print(f"atom_patches: there is no command {word!r}{hint}", file=sys.stderr)
        raise SystemExit(2)


def _written(action: argparse.Action) -> str:
    """An argument as it is typed."""
    value = action.metavar or (action.option_strings and action.dest.upper()) or action.dest
    takes = action.nargs != 0
    name = action.option_strings[-1] if action.option_strings else ""
    shown = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else str(value)
    return f"{name} {shown}".strip() if takes else name


def _listed(examples: Sequence[Example]) -> str | None:
    if not examples:
        return None
    lines = [f"  {PROGRAM} {arguments}\n        {does}" for arguments, does in examples]
    return "\n".join(["examples:", *lines])
