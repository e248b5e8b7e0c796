"""What the overlay logs: one line a process when it is handed a configuration, at the level that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from atom_patches.core import Verdict, log, settings


@pytest.fixture(autouse=True)
def at_info(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ATOM_LOG_LEVEL", raising=False)
    logger = logging.getLogger(log.NAME)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = True
    yield
    logger.setLevel(level)
    logger.propagate = propagate


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == log.NAME]


def test_what_is_on_and_what_is_off_and_why_in_one_line(toy: Any, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    never = toy.patch("toy.b", "core:Base.other", group="toy.never", when=lambda config: Verdict(False, "never"))
    late = toy.patch("toy.c", "late:late", group="toy.two")
    toy.arm(toy.patch("toy.a", "core:plain", group="toy.two"), never, late)
    two, one, again = make.config(2), make.config(1), make.config(2)
    toy.load("core")
    toy.configure(two, "worker")
    assert lines(caplog) == ["toy worker: toy.two (1 of 2 patches in place so far); off: toy.never (never)"]
    toy.configure(again, "worker")
    assert len(lines(caplog)) == 1, "and then no more"
    del two, again
    toy.configure(one, "worker")
    assert lines(caplog)[1:] == ["toy worker: nothing is on; off: toy.never (never); toy.two (pcp is 1)"]


@pytest.mark.parametrize(("asked", "shown"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0), ("", 2)])
def test_the_level_is_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str, shown: int
) -> None:
    monkeypatch.setenv("ATOM_LOG_LEVEL", asked)
    for say in (log.logger().debug, log.logger().info, log.logger().warning):
        say("one")
    assert len(lines(caplog)) == shown


def test_a_level_that_the_application_set_stands() -> None:
    logging.getLogger(log.NAME).setLevel(logging.ERROR)
    assert log.logger().level == logging.ERROR


def test_another_level_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_LOG_LEVEL", "loud")
    with pytest.raises(settings.SettingsError, match="ATOM_LOG_LEVEL='loud' is not allowed"):
        log.logger()
    assert any("ATOM_LOG_LEVEL" in message for message in settings.invalid_values(()))
