"""Every provider's functions take the schema's arguments, by name and in order; read from the source, so that engines
and libraries that are not installed here are covered too."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

from atom_patches import arming
from atom_patches.core import settings
from atom_patches.kernels.registry import Operation

PACKAGE = Path(arming.__file__).parent
OPERATIONS = [
    operation
    for family in settings.kernel_families()
    for operation in importlib.import_module(f"atom_patches.kernels.{family}").OPERATIONS
]


def modules(operation: Operation) -> list[Path]:
    kernels = PACKAGE / "kernels" / operation.family
    places = [kernels / f"{name}.py" for name in ("reference", "triton_impl", "aiter_impl")]
    places += [PACKAGE / engine / "kernels" / f"{operation.family}.py" for engine in arming.ENGINES]
    return [place for place in places if place.is_file()]


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The functions of a module, those that it takes from its siblings among them."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            sibling = path.parent / f"{node.module}.py"
            theirs = functions(sibling) if sibling.is_file() else {}
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            found |= theirs if "*" in names else {new: theirs[old] for new, old in names.items() if old in theirs}
    return found


def check(function: ast.FunctionDef, wanted: list[str], path: Path) -> None:
    """Its arguments are the first of the schema's, and all of them unless a `*rest` takes the others."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    rest = function.args.vararg is not None
    assert names == wanted[: len(names)] and (rest or len(names) == len(wanted)), f"{path}: {function.name}{names}"
    assert not [
        a for a, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if not default
    ]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_arguments_are_those_of_the_schema(operation: Operation) -> None:
    wanted = [argument.name for argument in torch._C.parse_schema(operation.name + operation.schema).arguments]
    for path in modules(operation):
        found = functions(path)
        for name in (operation.name, f"supports_{operation.name}", f"timed_{operation.name}"):
            if name in found:
                check(found[name], wanted, path)
        if any(name.endswith(f"_{operation.name}") for name in found if name.startswith(("supports_", "timed_"))):
            assert operation.name in found, f"{path} says something about {operation.name}, which it does not have"


def test_no_name_is_almost_that_of_an_operator() -> None:
    names = {operation.name for operation in OPERATIONS}
    for operation in OPERATIONS:
        for path in modules(operation):
            for name in functions(path):
                prefix, _, rest = name.partition("_")
                if prefix in ("supports", "timed"):
                    assert rest in names or settings.nearest(rest, names, cutoff=0.8) is None, f"{path}: {name}"
