"""docs/environment.md lists exactly the variables that are declared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atom_patches.core import settings
from tools import env_table


def test_every_variable_has_a_row_with_its_meaning() -> None:
    rows = env_table.table().splitlines()[2:]
    assert len(rows) == len(settings.TABLE)
    for row, setting in zip(rows, settings.TABLE, strict=True):
        assert row.startswith(f"| `{setting.name}` |")
        assert setting.meaning in row
        assert row.count(" | ") == 3


def test_the_document_is_up_to_date() -> None:
    text = env_table.DOCUMENT.read_text(encoding="utf-8")
    assert text == env_table.updated(text), "run: python tools/env_table.py --write"


def test_only_what_lies_between_the_markers_changes() -> None:
    text = f"before\n{env_table.START}\nold\n{env_table.END}\nafter\n"
    new = env_table.updated(text)
    assert new == f"before\n{env_table.START}\n\n{env_table.table()}\n\n{env_table.END}\nafter\n"
    assert env_table.updated(new) == new


def test_a_changed_default_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = tmp_path / "environment.md"
    document.write_text(env_table.updated(f"{env_table.START}{env_table.END}"))
    monkeypatch.setattr(env_table, "DOCUMENT", document)
    monkeypatch.setattr("sys.argv", ["env_table.py", "--check"])
    assert env_table.main() == 0
    monkeypatch.setattr(settings, "TABLE", (replace(settings.TABLE[0], default="1"), *settings.TABLE[1:]))
    assert env_table.main() == 1


@pytest.mark.parametrize("text", ["no markers", env_table.START, f"{env_table.END}\n{env_table.START}"])
def test_missing_markers_are_named(text: str) -> None:
    with pytest.raises(SystemExit, match="end of environment variables"):
        env_table.updated(text)
