"""A made-up engine, written to disk as real modules, and a registry of its own."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from atom_patches.core import Engine, Patch, Verdict, report, reviewed
from atom_patches.core.registry import Registry

_number = itertools.count()

CORE = '''
"""Where everything is defined."""
import functools

LIMIT = 3


def plain(x, *, y: int = 1) -> int:
    """Plain."""
    return x + y


def helper(x):
    return x


def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper


@decorate
def decorated(x):
    return x


class Base:
    """Base."""

    def method(self, x):
        """Method."""
        return x

    @classmethod
    def cls(cls, x):
        return (cls.__name__, x)

    @staticmethod
    def stat(x):
        return x

    @property
    def prop(self):
        return 1

    def other(self):
        return 1


class Child(Base):
    """Inherits everything."""


class Own(Base):
    def method(self, x):
        return -x
'''
USER = "from {name}.core import plain\n\nTABLE = {{'plain': plain}}\n\n\ndef use(x):\n    return plain(x)\n"
LATE = "def late(x):\n    return x\n"


class Toy:
    """The made-up engine: package `name` in `root`, its patches' package, a registry and what it was told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = f"toy_{next(_number)}"
        self.registry = Registry()
        self.bound: list[Mapping[str, str]] = []
        self.engine = Engine(
            name="toy",
            package=self.name,
            distributions=(),
            declarations=f"{self.name}_patches",
            bind_cache_key=lambda config, active: self.bound.append(dict(active)),
            describe=lambda config: {"pcp": str(config.pcp)},
        )
        self.write("__init__", '__version__ = "1.0.0"\n')
        self.write("core", CORE)
        self.write("user", USER.format(name=self.name))
        self.write("late", LATE)
        self.declarations = root / self.engine.declarations
        self.declarations.mkdir()
        (self.declarations / "__init__.py").write_text("")

    def write(self, module: str, text: str) -> Path:
        file = self.root / self.name / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
        return file

    def load(self, module: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{module}")

    def patch(self, id: str, target: str, wrap: Any = None, **facts: Any) -> Patch:
        """A correctness patch, wanted when `config.pcp > 1`, that adds 100 to a function's result."""
        facts.setdefault("kind", "correctness")
        facts.setdefault("supports", "toy>=1,<2")
        facts.setdefault("when", lambda config: Verdict(config.pcp > 1, f"pcp is {config.pcp}"))
        facts["relies_on"] = tuple(f"{self.name}.{text}" for text in facts.get("relies_on", ()))
        patch = Patch(id=id, target=f"{self.name}.{target}", **facts)
        patch.around(wrap or plus(100))
        return patch

    def review(self, *patches: Patch, version: str = "1.0.0") -> None:
        reviewed.ship(self.engine, patches, version)

    def arm(self, *patches: Patch, review: bool = True) -> None:
        """Record the patches' source as reviewed, and arm."""
        if review:
            self.review(*patches)
        self.registry.arm(self.engine, patches)

    def configure(self, config: Any, role: str = "engine core") -> None:
        importlib.import_module(self.name)  # whoever has a configuration has imported the engine
        self.registry.configure("toy", config, role)

    def states(self) -> dict[str, str]:
        return {report.id: report.state for report in self.registry.status("toy")}

    def reason(self, id: str) -> str:
        return next(report.reason for report in self.registry.status("toy") if report.id == id)


def plus(amount: int) -> Any:
    def builder(original: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + amount

        return replacement

    return builder


class Config:
    """A configuration, compared by value like the engines' own."""

    def __init__(self, pcp: int = 1) -> None:
        self.pcp = pcp

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and other.pcp == self.pcp

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(state))
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "accepted.json"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(report, "_own", {})  # what it publishes is nobody's afterwards
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Toy(tmp_path)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in (made.name, made.engine.declarations)]:
        del sys.modules[name]


@pytest.fixture
def make() -> SimpleNamespace:
    """`make.config(pcp)` and `make.plus(n)`, for tests that build their own."""
    return SimpleNamespace(config=Config, plus=plus)
