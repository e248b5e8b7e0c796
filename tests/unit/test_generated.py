"""Documents of which one part is generated, and docs/upstream.md, which is one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import upstream_table
from generated import Part

from atom_patches.core import discovery
from atom_patches.sglang.engine import ENGINE as SGLANG
from atom_patches.vllm.engine import ENGINE as VLLM


@pytest.fixture
def part(tmp_path: Path) -> Part:
    document = tmp_path / "list.md"
    made = Part(document, "toy", lambda: "new")
    document.write_text(f"before\n{made.start}\nold\n{made.end}\nafter\n")
    return made


def test_only_what_lies_between_the_markers_changes(part: Part) -> None:
    part.write()
    text = part.document.read_text()
    assert text == f"before\n{part.start}\n\nnew\n\n{part.end}\nafter\n"
    assert part.updated(text) == text


def test_a_change_is_noticed_and_the_remedy_named(part: Part, capsys: pytest.CaptureFixture[str]) -> None:
    assert part.check("make toy") == 1
    assert capsys.readouterr().err == "toy: list.md is out of date; run: make toy\n"
    part.write()
    assert part.check("make toy") == 0


@pytest.mark.parametrize("order", [(), (0,), (1, 0)])
def test_missing_markers_are_named(part: Part, order: tuple[int, ...]) -> None:
    markers = (part.start, part.end)
    with pytest.raises(SystemExit, match="needs the lines"):
        part.updated("\n".join(markers[number] for number in order))


def test_the_list_of_upstream_changes_is_up_to_date() -> None:
    assert upstream_table.PART.check("python tools/upstream_table.py --write") == 0


def test_every_patch_says_what_would_retire_it_and_when_its_file_goes() -> None:
    rows = upstream_table.table().splitlines()
    for patch in [*discovery.load(VLLM), *discovery.load(SGLANG)]:
        (row,) = (row for row in rows if row.startswith(f"| `{patch.id}` |"))
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 3 and all(cells), row


def test_references_are_links() -> None:
    table = upstream_table.table()
    assert "[vllm-project/vllm#43547](https://github.com/vllm-project/vllm/issues/43547)" in table
    bare = re.sub(r"\[[^]]*\]\([^)]*\)", "", table)
    assert not re.search(r"\w/[\w.-]+#\d", bare)
