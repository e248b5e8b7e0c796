"""Keep docs/cli.md equal to the command line: what each command says about itself, its options and its examples.

python tools/cli_page.py            # print it
python tools/cli_page.py --write    # put it between the markers in docs/cli.md
python tools/cli_page.py --check    # exit status 1 if docs/cli.md has something else
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from generated import Part  # noqa: E402

from atom_patches import arming  # noqa: E402

arming.disarm()

from atom_patches.cli import parsers  # noqa: E402
from atom_patches.cli.parsing import PROGRAM, Parser  # noqa: E402


def page() -> str:
    """A section a command, in Markdown."""
    return "\n".join(line for name, parser in parsers()[1].by_name.items() for line in _section(name, parser)).rstrip()


def _section(name: str, parser: Parser) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    yield (parser.description or "").replace("\n", " ")
    yield ""
    yield "```"
    for arguments, does in parser.examples:
        yield from (f"# {does}", f"{PROGRAM} {arguments}")
    yield "```"
    yield ""
    if parser.documented:
        yield from ("| | |", "|---|---|")
        yield from (f"| `{words}` | {told.replace('|', chr(92) + '|')} |" for words, told in parser.documented)
        yield ""


PART = Part(ROOT / "docs" / "cli.md", "cli_page", page)

if __name__ == "__main__":
    sys.exit(PART.main(__doc__))
