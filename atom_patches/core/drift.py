"""Fingerprints of upstream source: has the code that a patch was written against changed?

A fingerprint keeps no upstream text. It hashes the tokens of each logical line, so that comments, docstrings,
blank lines, line breaks and the Python version make no difference, and so that a changed source can still be
compared with the reviewed one line by line.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from atom_patches.core import source
from atom_patches.core.patch import Target
from atom_patches.core.source import Found

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
# From Python 3.12 on, f-strings (and t-strings) come in pieces; before, they are one token.
_OPENING = {value for name in ("FSTRING_START", "TSTRING_START") if (value := getattr(tokenize, name, None))}
_CLOSING = {value for name in ("FSTRING_END", "TSTRING_END") if (value := getattr(tokenize, name, None))}


class Line(NamedTuple):
    """One logical line of a definition: where it starts, its first line as written, its hash."""

    file: str
    number: int
    text: str
    hash: str


class Fingerprint(NamedTuple):
    """The source of a target, hashed as a whole and by logical line."""

    hash: str
    lines: tuple[str, ...]


def current_lines(target: Target) -> list[Line]:
    """The logical lines of the installed source of `target`, all its definitions one after the other.

    Raises:
        SourceError: the installed files do not define it.
    """
    return [line for found in source.find(target) for line in lines_of(found)]


def fingerprint(lines: Iterable[Line]) -> Fingerprint:
    """The fingerprint of these lines."""
    hashes = tuple(line.hash for line in lines)
    return Fingerprint(_digest(" ".join(hashes)), hashes)


def lines_of(found: Found) -> list[Line]:
    """The logical lines of one definition, decorators included, docstrings and comments left out."""
    first, last = _first_line(found.node), found.node.end_lineno or found.node.lineno
    written = found.module.lines[first - 1 : last]
    documented = set(_docstring_lines(found.node))
    lines: list[Line] = []
    for depth, tokens in _logical_lines(written, first, documented):
        number = tokens[0][1]
        text = written[number - first].strip()
        lines.append(Line(found.module.file, number, text, _digest(f"{depth} {' '.join(word for word, _ in tokens)}")))
    return lines


def diff(reviewed: Sequence[Fingerprint], lines: Sequence[Line]) -> list[str]:
    """What differs between the installed lines and the most similar reviewed source.

    Returns:
        One entry per changed place, as `file:line: + text` for installed lines that were not reviewed and
        `file:line: - n line(s)` where reviewed lines are gone (their text is not kept).
    """
    hashes = [line.hash for line in lines]
    matchers = [difflib.SequenceMatcher(None, known.lines, hashes, autojunk=False) for known in reviewed]
    if not matchers or not lines:
        return []
    best = max(matchers, key=lambda matcher: matcher.ratio())
    changes: list[str] = []
    for operation, old, old_end, new, new_end in best.get_opcodes():
        if operation == "equal":
            continue
        if old_end > old:
            at = lines[min(new, len(lines) - 1)]
            changes.append(f"{at.file}:{at.number}: - {old_end - old} reviewed line(s)")
        changes += [f"{line.file}:{line.number}: + {line.text}" for line in lines[new:new_end]]
    return changes


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _first_line(node: source.Definition) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _docstring_lines(node: ast.AST) -> Iterator[int]:
    for one in ast.walk(node):
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        first = one.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def _logical_lines(
    written: Sequence[str], first: int, documented: set[int]
) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Depth and tokens of each logical line; a token is its text and the number of the line it starts in."""
    indented = written[0][:1].isspace()
    # An indented block is not valid by itself; one more line in front makes it so.
    text = ("if 1:\n" if indented else "") + "".join(written)
    shift = first - 2 if indented else first - 1
    depth = -1 if indented else 0
    tokens: list[tuple[str, int]] = []
    for kind, word, number in _joined(tokenize.generate_tokens(io.StringIO(text).readline), text):
        if kind == tokenize.INDENT:
            depth += 1
        elif kind == tokenize.DEDENT:
            depth -= 1
        elif kind == tokenize.NEWLINE:
            if tokens and tokens[0][1] >= first:
                yield depth, tokens
            tokens = []
        elif not (kind == tokenize.STRING and number + shift in documented):
            tokens.append((word, number + shift))


def _joined(tokens: Iterable[tokenize.TokenInfo], text: str) -> Iterator[tuple[int, str, int]]:
    """Kind, text and line of each token that is not layout; every string, formatted or not, is one token."""
    lines = source.lines_of(text)
    nested = 0
    start = (0, 0)
    for token in tokens:
        if token.type in _OPENING:
            start = start if nested else token.start
            nested += 1
        elif token.type in _CLOSING:
            nested -= 1
            if not nested:
                yield tokenize.STRING, _between(lines, start, token.end), start[0]
        elif not nested and token.type not in _LAYOUT:
            yield token.type, token.string, token.start[0]


def _between(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return "".join([lines[start[0] - 1][start[1] :], *middle, lines[end[0] - 1][: end[1]]])
