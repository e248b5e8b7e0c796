"""A pytest plugin for an engine's own tests: with every patch that fits in its place, or with none.

    python -m pytest -p in_place --patches ENGINE --outcomes FILE ...

Writes to FILE, as JSON, the outcome of every test, and how often the function of every patch was called.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

OUTCOMES = pytest.StashKey[dict[str, str]]()
CALLS: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--patches", metavar="ENGINE", help="put all patches of ENGINE that fit it in their places")
    parser.addoption("--outcomes", metavar="FILE", required=True)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}
    name = config.getoption("--patches")
    if name:
        put_in_place(name)


def put_in_place(name: str) -> None:
    """Apply every patch that fits the installed engine; those of modules that are imported later follow then."""
    from forced import Config, forced, undescribed  # pyright: ignore[reportMissingImports]

    from atom_patches import arming
    from atom_patches.core import State, discovery, gates
    from atom_patches.core.registry import Registry

    arming.disarm()
    engine = importlib.import_module(f"atom_patches.{name}.engine").ENGINE
    patches = [forced(patch) for patch in discovery.load(engine) if gates.fits(engine, patch).state is State.PENDING]
    for patch in patches:
        patch.builder = functools.partial(counted, patch.id, patch.builder)
        CALLS[patch.id] = 0
    registry = Registry()
    registry.arm(undescribed(engine), patches)
    registry.configure(name, Config(), "engine")


def counted(patch: str, builder: Any, original: Any) -> Any:
    """The builder's function, which counts its calls; what is not a function stays as it is."""
    built = builder(original)
    if not isinstance(built, FunctionType):
        return built

    @functools.wraps(built)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[patch] += 1
        return built(*args, **kwargs)

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    outcomes = item.config.stash[OUTCOMES]
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = {"outcomes": session.config.stash[OUTCOMES], "calls": CALLS}
    Path(str(session.config.getoption("--outcomes"))).write_text(json.dumps(found), encoding="utf-8")
