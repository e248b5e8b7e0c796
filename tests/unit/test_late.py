"""An engine that was built before the overlay was armed is noticed, and only then."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from atom_patches.core import late, report
from atom_patches.core.engine import Engine
from atom_patches.core.patch import PatchError


@dataclass
class Config:
    """What an engine is built from."""

    size: int = 1


def engine(built_class: str = "lathe.config:Config") -> Engine:
    return Engine(
        name="lathe",
        package="lathe",
        distributions=("lathe",),
        declarations="lathe_patches",
        bind_cache_key=lambda config, active: None,
        describe=lambda config: {},
        built=built_class,
    )


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    module = ModuleType("lathe.config")
    vars(module)["Config"] = Config
    monkeypatch.setitem(sys.modules, "lathe.config", module)
    monkeypatch.setenv("ATOM_PATCHES_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("ATOM_PATCHES_STRICT", raising=False)
    monkeypatch.setattr(report, "_own", {})
    yield
    gc.collect()


def test_no_configuration_no_engine() -> None:
    assert not late.built(engine())


def test_a_living_configuration_means_an_engine() -> None:
    config = Config()
    assert late.built(engine())
    del config
    gc.collect()
    assert not late.built(engine())


@pytest.mark.parametrize("built_class", ["", "lathe.missing:Config", "lathe.config:Missing"])
def test_what_cannot_be_known_is_not_claimed(built_class: str) -> None:
    config = Config()
    assert not late.built(engine(built_class))
    del config


def test_the_process_says_so_for_doctor() -> None:
    late.report(engine())
    (found,) = report.processes()
    assert (found.pid, found.roles) == (os.getpid(), (late.ROLE,))
    assert "before atom_patches was armed" in found.notes[0] and "ATOM_PATCHES=1" in found.notes[0]


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCHES_STRICT", "1")
    with pytest.raises(PatchError, match="had built an engine in this process"):
        late.report(engine())
