"""`completion SHELL`: a script that completes commands, options and patches for `atom-patches`.

Everything it offers is written into the script: pressing tab starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from atom_patches.cli import catalogue
from atom_patches.core import settings

if TYPE_CHECKING:
    from atom_patches.cli.parsing import Commands

TAKE_PATCHES = ("explain", "accept")

SCRIPT = """\
{preamble}_atom_patches() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command="${{COMP_WORDS[1]-}}" words=
    local two="$command ${{COMP_WORDS[2]-}}"
    case "$two" in {two_words}) command=$two ;; esac
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W {first} -- "$word"))
        return
    fi
    case "$command:$before" in
{after_option}
        *) case "$command" in
{in_command}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _atom_patches atom-patches
"""


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add(
        "completion",
        "print a script that completes `atom-patches` in your shell",
        'Print a script for your shell; put  eval "$(atom-patches completion bash)"  into ~/.bashrc. `atom-patches` is '
        "the same program as `python -m atom_patches`. Print it again after an update: patches are listed in it.",
        [("completion bash", "for ~/.bashrc"), ("completion zsh", "for ~/.zshrc, after compinit")],
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="your shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from atom_patches.cli import parsers

    print(script(arguments.shell, parsers()[1]), end="")
    return 0


def script(shell: str, commands: Commands) -> str:
    """The script: zsh runs bash's, once it has loaded what that takes."""
    names = list(commands.by_name)
    two = [name for name in names if " " in name]
    firsts = sorted({name.partition(" ")[0] for name in names})
    known = list(dict.fromkeys([*names, *firsts]))
    in_command = [f"            {_pattern(name)}) words={_words(_offered(name, commands))} ;;" for name in known]
    after_option = [
        f"        {_pattern(f'{name}:{option}')}) words={_words(choices)} ;;"
        for name, parser in commands.by_name.items()
        for option, choices in parser.values.items()
        if choices and option.startswith("-")
    ]
    return SCRIPT.format(
        preamble="autoload -U bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        two_words="|".join(map(_pattern, two)),
        first=_words([*firsts, "--help", "--version"]),
        after_option="\n".join(after_option),
        in_command="\n".join(in_command),
    )


def _offered(name: str, commands: Commands) -> list[str]:
    """What may follow a command: its second word, its options, the values of its arguments, patches, operations."""
    seconds = [other.partition(" ")[2] for other in commands.by_name if other.startswith(f"{name} ")]
    if name not in commands.by_name:
        return seconds
    parser = commands.by_name[name]
    values = [value for option, some in parser.values.items() if not option.startswith("-") for value in some]
    patches = _patches() if name in TAKE_PATCHES else []
    families = settings.kernel_families() if name == "bench" else ()
    return [*seconds, *parser.options, *values, *patches, *families]


def _patches() -> list[str]:
    declared = [patch for engine in catalogue.engines() for patch in catalogue.patches(engine)]
    return sorted({patch.id for patch in declared} | {patch.group for patch in declared if patch.group is not None})


def _words(words: list[str] | tuple[str, ...]) -> str:
    return shlex.quote(" ".join(words))


def _pattern(text: str) -> str:
    """A pattern of `case` that matches this text only."""
    return shlex.quote(text)
