"""Dependencies point one way: engines -> models -> kernels and runtime -> core; none of the latter knows an engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import atom_patches

PACKAGE = Path(atom_patches.__file__).parent
ENGINES = {"vllm", "sglang"}
#: What a package may import of this one, besides itself.
ALLOWED = {
    "core": set[str](),
    "runtime": set[str](),
    "kernels": {"core"},
    "models": {"core", "kernels", "runtime"},
}
FILES = [path for package in ALLOWED for path in sorted((PACKAGE / package).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; those for type checkers, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, path)


def _imported_from(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    module = node.module or ""
    if node.level:
        folder = path.relative_to(PACKAGE.parent).parts[: -node.level]
        module = ".".join((*folder, module) if module else folder)
    if module == "atom_patches":
        yield from (f"atom_patches.{alias.name}" for alias in node.names)
    else:
        yield module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path: Path) -> None:
    package = path.relative_to(PACKAGE).parts[0]
    for name in imported(path):
        first, _, rest = name.partition(".")
        assert first not in ENGINES, f"{name} is an engine's"
        if first == "atom_patches" and rest:
            assert rest.partition(".")[0] in {package, *ALLOWED[package]}, f"{package} must not import {name}"
