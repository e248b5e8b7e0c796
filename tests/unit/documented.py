"""The commands in the documentation: what a reader would type, wherever it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

PROGRAMS = (
    "atom-patches", "docker", "eval", "kubectl", "make", "pip", "pre-commit", "py-spy", "pytest", "python", "python3",
    "source", "vllm",
)  # fmt: skip


class Command(NamedTuple):
    """A command, without variables that are set before it and without its comment, and where it stands."""

    text: str
    file: str


def files() -> list[Path]:
    """What users and contributors read."""
    named = ("README.md", "CONTRIBUTING.md", "changelog.d/README.md")
    return [*(ROOT / name for name in named), *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[Command]:
    """Every command of the documentation, once a file."""
    texts = ((path, text) for path in files() for text in in_text(path.read_text(encoding="utf-8")))
    return list(dict.fromkeys(Command(text, str(path.relative_to(ROOT))) for path, text in texts))


def in_text(text: str) -> Iterator[str]:
    """The commands of one file: in code blocks, fenced or indented, and within a line."""
    fenced = list(re.finditer(r"^( *)```.*?\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL))
    rest = text
    for block in reversed(fenced):
        rest = rest[: block.start()] + rest[block.end() :]
    lines = [line for block in fenced for line in _joined(block[2])]
    lines += [line for line in _joined(rest) if line.startswith("    ")]
    lines += re.findall(r"`([^`\n]+)`", rest.replace("\n", " "))
    for line in lines:
        if (command := command_of(line)) is not None:
            yield command


def _joined(block: str) -> list[str]:
    return re.sub(r" *\\\n\s*", " ", block).splitlines()


def command_of(line: str) -> str | None:
    """The command in a line, if it is one."""
    bare = re.sub(r"\s+#\s.*$", "", line.strip())
    bare = re.sub(r"^(?:[A-Z_]+=\S*\s+)+", "", bare)
    words = bare.split()
    if len(words) < 2 or words[0] not in PROGRAMS or bare.startswith("python3 -c"):
        return None
    return " ".join(words)
