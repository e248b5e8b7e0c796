"""Triggers fire once a module's code has run: before its import, after it, and in the middle of it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from atom_patches.core import hooks


def test_before_and_after_the_import(toy: Any) -> None:
    seen: list[str] = []
    hooks.when_imported(f"{toy.name}.late", lambda module: seen.append(f"early {module.late(1)}"))
    assert hooks.imported(f"{toy.name}.late") is None and seen == []
    toy.load("late")
    hooks.when_imported(f"{toy.name}.late", lambda module: seen.append(f"afterwards {module.late(2)}"))
    assert seen == ["early 1", "afterwards 2"]


def test_module_counts_as_imported_while_its_trigger_runs(toy: Any) -> None:
    seen: list[bool] = []
    name = f"{toy.name}.late"
    hooks.when_imported(name, lambda module: seen.append(hooks.imported(name) is module))
    toy.load("late")
    assert seen == [True]


def registers_itself(toy: Any, tail: str) -> list[str]:
    """A module that asks for its own triggers while it is being imported, as a plugin loaded by it would."""
    seen: list[str] = []
    toy.write(
        "partial",
        "import sys\n"
        f"from atom_patches.core import hooks\nimport {toy.name}.probe as probe\n"
        "probe.report(hooks.imported(__name__) is None)\n"
        "hooks.when_imported(__name__, lambda module: probe.report(module.after))\n"
        "hooks.when_imported(__name__, lambda module: probe.report('second'))\n" + tail,
    )
    toy.write("probe", "report = None\n")
    toy.load("probe").report = seen.append
    return seen


def test_in_the_middle_of_the_import(toy: Any) -> None:
    seen = registers_itself(toy, "after = 'complete'\n")
    module = toy.load("partial")
    assert seen == [True, "complete", "second"]
    assert type(module.__spec__) is ModuleSpec
    hooks.when_imported(module.__name__, lambda module: seen.append("later"))
    assert seen[-1] == "later"


def test_failed_import_triggers_nothing(toy: Any) -> None:
    seen = registers_itself(toy, "raise ValueError('broken')\n")
    with pytest.raises(ValueError, match="broken"):
        toy.load("partial")
    assert seen == [True]
    assert f"{toy.name}.partial" not in sys.modules


def test_error_of_a_trigger_reaches_the_import_statement(toy: Any) -> None:
    def refuse(module: Any) -> None:
        raise RuntimeError("refused")

    hooks.when_imported(f"{toy.name}.late", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        toy.load("late")
