"""What `compare` asks: the prompts of a file, or a few of every length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atom_patches.cli import CommandError

if TYPE_CHECKING:
    from atom_patches.bench.client import Prompt

PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "def fibonacci(n):\n    ",
    "Translate into German: The weather is fine today, and the children are playing in the garden.",
    "Q: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Explain step by step how a refrigerator moves heat from its inside to the room. " * 4,
    "Summarise in one sentence. " + "The river rises in the hills, crosses the plain and ends in a wide delta. " * 24,
)
"""Asked if no file of prompts is given."""


def read(path: Path | None) -> list[Prompt]:
    """The prompts of a file: a line each, or of .jsonl each line's `prompt`; some of our own without one.

    Raises:
        CommandError: it cannot be read, or has something else.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise CommandError(f"--prompts {path}: there is no prompt in it.")
    return (
        [_prompt(path, number, line) for number, line in enumerate(lines, 1)] if path.suffix == ".jsonl" else [*lines]
    )


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        found: Any = json.loads(line)["prompt"]
    except (ValueError, LookupError, TypeError):
        found = None
    if isinstance(found, str) and found:
        return found
    tokens = cast("list[Any]", found) if isinstance(found, list) else []
    if tokens and all(type(one) is int for one in tokens):
        return tokens
    raise CommandError(f'--prompts {path}, line {number}: not {{"prompt": a text, or a list of token ids}}.')
