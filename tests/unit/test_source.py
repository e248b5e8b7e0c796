"""Definitions are found from the files alone, wherever a name may come from."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from atom_patches.core import Target, source
from atom_patches.core.source import SourceError


def found(toy: Any, qualname: str, module: str = "m") -> list[str]:
    """`file:first line's text` of each definition."""
    places = source.find(Target(f"{toy.name}.{module}" if module else toy.name, qualname))
    return [f"{one.module.name.rpartition('.')[2]}: {one.module.lines[one.node.lineno - 1].strip()}" for one in places]


def test_nothing_is_imported(toy: Any) -> None:
    assert found(toy, "Base.method", "core") == ["core: def method(self, x):"]
    assert not [name for name in sys.modules if name.partition(".")[0] == toy.name]


SETTER = ["m: def f(s): a", "m: def f(s, v): b"]


@pytest.mark.parametrize(
    ("text", "qualname", "expected"),
    [
        ("if X:\n    def f(): a\nelse:\n    def f(): b\n", "f", ["m: def f(): a", "m: def f(): b"]),
        ("try:\n    from no_such_module import f\nexcept ImportError:\n    def f(): b\n", "f", ["m: def f(): b"]),
        ("try:\n    def f(): a\nexcept ImportError:\n    f = None\n", "f", ["m: def f(): a", "m: f = None"]),
        ("from .core import helper as f\n", "f", ["core: def helper(x):"]),
        ("from {name}.core import Base as B\n", "B.stat", ["core: def stat(x):"]),
        ("from {name} import core\n", "core.Base.stat", ["core: def stat(x):"]),
        ("import {name}.core as c\n", "c.helper", ["core: def helper(x):"]),
        ("import {name}.core\n", "{name}.core.helper", ["core: def helper(x):"]),
        ("from .core import *\n", "helper", ["core: def helper(x):"]),
        ("from .core import Base\nclass C(Base):\n    pass\n", "C.method", ["core: def method(self, x):"]),
        ("import {name}.core as c\nclass C(c.Base[int]):\n    pass\n", "C.stat", ["core: def stat(x):"]),
        ("class A:\n    def f(self): a\nclass C(Unknown, A):\n    pass\n", "C.f", ["m: def f(self): a"]),
        ("from .core import helper\nf = helper\n", "f", ["core: def helper(x):"]),
        ("LIMIT: int = 3\n", "LIMIT", ["m: LIMIT: int = 3"]),
        ("f = make(3)\n", "f", ["m: f = make(3)"]),
        ("if TYPE_CHECKING:\n    from .late import late as f\nelse:\n    def f(): b\n", "f", ["m: def f(): b"]),
        ("if t.TYPE_CHECKING:\n    def f(): a\ndef f(): b\n", "f", ["m: def f(): b"]),
        ("class A:\n    if X:\n        def f(s): a\n    else:\n        f = 1\n", "A.f", ["m: def f(s): a", "m: f = 1"]),
        ("class A:\n    @property\n    def f(s): a\n    @f.setter\n    def f(s, v): b\n", "A.f", SETTER),
        ("async def f(): a\n", "f", ["m: async def f(): a"]),
        ("with x:\n    for y in z:\n        while 1:\n            def f(): a\n", "f", ["m: def f(): a"]),
    ],
)  # fmt: skip
def test_where_a_name_comes_from(toy: Any, text: str, qualname: str, expected: list[str]) -> None:
    toy.write("m", text.format(name=toy.name))
    assert found(toy, qualname.format(name=toy.name)) == expected


@pytest.mark.parametrize(
    ("text", "qualname", "complaint"),
    [
        ("", "f", "does not define f"),
        ("from .core import nothing\n", "nothing", "does not define nothing"),
        ("from .m import f\n", "f", "defined by itself"),
        ("class A(A):\n    pass\n", "A.f", "A.f is not defined"),
        ("f = make()\n", "f.g", "does not say what g is"),
        ("import os as f\n", "f", "binds the module os, not a definition"),
        ("def f(:\n", "f", "cannot be parsed"),
    ],
)
def test_what_is_missing_is_named(toy: Any, text: str, qualname: str, complaint: str) -> None:
    toy.write("m", text)
    with pytest.raises(SourceError, match=complaint):
        found(toy, qualname)


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.module", "math", "os.no_such_module"])
def test_missing_module_is_named(module: str) -> None:
    with pytest.raises(SourceError, match=f"{module} is not installed, or has no source file"):
        source.find(Target(module, "f"))


def test_package_without_the_name_falls_back_to_its_submodule(toy: Any) -> None:
    assert found(toy, "core.helper", "") == ["core: def helper(x):"]


def test_package_without_a_file_of_its_own(toy: Any) -> None:
    (toy.root / toy.name / "plain").mkdir()
    toy.write("plain/m", "def f(): a\n")
    assert found(toy, "f", "plain.m") == ["m: def f(): a"]
    assert not [name for name in sys.modules if name.partition(".")[0] == toy.name]


def test_edited_file_is_read_again(toy: Any) -> None:
    toy.write("m", "def f(): first\n")
    assert found(toy, "f") == ["m: def f(): first"]
    toy.write("m", "\ndef f(): second\n")
    assert found(toy, "f") == ["m: def f(): second"]
