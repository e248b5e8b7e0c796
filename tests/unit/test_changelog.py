"""The changes that wait in changelog.d/: towncrier leaves out a file whose name it does not know, and says nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import site_pages

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "changelog.d"
BESIDE = {"README.md", "template.md.jinja"}
WAITING = sorted(path for path in FOLDER.iterdir() if path.name not in BESIDE)
CONFIGURED = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_kind_is_explained() -> None:
    kinds = re.findall(r'directory = "(\w+)", name', CONFIGURED)
    assert kinds == re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", WAITING, ids=lambda path: path.name)
def test_a_change_has_a_kind_and_no_bullet(path: Path) -> None:
    found = re.fullmatch(r"[a-z0-9-]+\.(\w+)(\.\d+)?\.md", path.name)
    assert found is not None and f'directory = "{found[1]}"' in CONFIGURED
    text = path.read_text(encoding="utf-8")
    assert re.match(r"[^\s\-*#]", text) and text.endswith("\n") and "\n\n" not in text


def test_a_release_finds_its_place() -> None:
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count(site_pages.RELEASES) == 1
    assert repr(site_pages.RELEASES).strip("'") in CONFIGURED
