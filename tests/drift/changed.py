"""An engine in which functions were changed: links to the installed one, with some files replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from atom_patches.core import Target, discovery, source
from tests import installed

EDIT = "drift_drill = 1"


def engine_with_changed(targets: Iterable[Target], root: Path) -> Path:
    """A folder to put on the path: the installed engine, with one line more in each definition of each target."""
    package = discovery.package_folder(installed.ENGINE.package)
    places: dict[Path, dict[int, int]] = {}
    lines: dict[Path, list[str]] = {}
    for target in targets:
        for found in source.find(target):
            file = Path(found.module.file).relative_to(package)
            lines[file] = list(found.module.lines)
            places.setdefault(file, {})[found.node.end_lineno or 0] = _indent(found.node)
    for file, after in places.items():
        for number in sorted(after, reverse=True):
            lines[file].insert(number, " " * after[number] + EDIT + "\n")
    _link_around(package, root / package.name, {file: "".join(text) for file, text in lines.items()})
    return root


def _indent(node: ast.stmt) -> int:
    """How far the last statement of a definition's body is indented."""
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)), "only these take one line more"
    return node.body[-1].col_offset


def _link_around(folder: Path, copy: Path, replaced: Mapping[Path, str]) -> None:
    """Links to everything but the replaced files, whose folders become real ones."""
    copy.mkdir()
    below: dict[str, dict[Path, str]] = {}
    for file, text in replaced.items():
        below.setdefault(file.parts[0], {})[Path(*file.parts[1:])] = text
    for entry in folder.iterdir():
        inside = below.get(entry.name)
        if inside is None:
            if entry.name != "__pycache__":
                (copy / entry.name).symlink_to(entry)
        elif entry.is_dir():
            _link_around(entry, copy / entry.name, inside)
        else:
            (copy / entry.name).write_text(inside[Path()])
