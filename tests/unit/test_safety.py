"""What docs/safety.md promises about the code: no network, nothing evaluated, nothing unpickled; and the .pth file."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import atom_patches

PACKAGE = Path(atom_patches.__file__).parent
ROOT = PACKAGE.parent
FORBIDDEN_MODULES = {"ftplib", "http", "httpx", "marshal", "pickle", "requests", "shelve", "socket", "urllib3"}
FORBIDDEN_CALLS = {"compile", "eval", "exec"}
MAY = {"atom_patches/bench/client.py": {"urllib.request"}, "atom_patches/bench/server.py": {"urllib.request", "socket"}}
"""`compare` starts two servers on this machine, and asks them."""
FILES = sorted([*PACKAGE.rglob("*.py"), ROOT / "atom_patches_boot.py"])


def findings(text: str, may: Collection[str] = ()) -> Iterator[str]:
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
            if name not in may and (name.partition(".")[0] in FORBIDDEN_MODULES or name.startswith("urllib.request")):
                yield f"line {node.lineno} imports {name}"


def test_no_file_opens_a_connection_evaluates_or_unpickles() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
    found = {name: list(findings(text, MAY.get(name, ()))) for name, text in texts.items()}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_who_may_open_one_asks_this_machine_alone() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in MAY]
    assert {host for text in texts for host in re.findall(r"https?://([^:/{]*)", text)} == {"127.0.0.1"}


@pytest.mark.parametrize(
    "text", ["import pickle", "from urllib.request import urlopen", "import socket as s", "eval('1')", "exec(text)"]
)
def test_each_would_be_found(text: str) -> None:
    assert list(findings(text))


def test_the_pth_file_is_the_line_that_is_documented() -> None:
    line = (ROOT / "atom_patches.pth").read_text(encoding="utf-8").strip()
    assert "\n" not in line
    assert line in (ROOT / "docs" / "safety.md").read_text(encoding="utf-8")
