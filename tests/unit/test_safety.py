"""What docs/safety.md promises about the code: no network, nothing evaluated, nothing unpickled; and the .pth file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import atom_patches

PACKAGE = Path(atom_patches.__file__).parent
ROOT = PACKAGE.parent
FORBIDDEN_MODULES = {"ftplib", "http", "httpx", "marshal", "pickle", "requests", "shelve", "socket", "urllib3"}
FORBIDDEN_CALLS = {"compile", "eval", "exec"}
FILES = sorted([*PACKAGE.rglob("*.py"), ROOT / "atom_patches_boot.py"])


def findings(text: str) -> Iterator[str]:
    """What a file imports or calls that it may not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"line {node.lineno} calls {node.func.id}"
            continue
        else:
            continue
        for name in names:
            if name.partition(".")[0] in FORBIDDEN_MODULES or name.startswith("urllib.request"):
                yield f"line {node.lineno} imports {name}"


def test_no_file_opens_a_connection_evaluates_or_unpickles() -> None:
    found = {str(path.relative_to(ROOT)): list(findings(path.read_text(encoding="utf-8"))) for path in FILES}
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text", ["import pickle", "from urllib.request import urlopen", "import socket as s", "eval('1')", "exec(text)"]
)
def test_each_would_be_found(text: str) -> None:
    assert list(findings(text))


def test_the_pth_file_is_the_line_that_is_documented() -> None:
    line = (ROOT / "atom_patches.pth").read_text(encoding="utf-8").strip()
    assert "\n" not in line
    assert line in (ROOT / "docs" / "safety.md").read_text(encoding="utf-8")
