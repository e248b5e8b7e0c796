"""Conditions that meet another release's configuration, and what the overlay makes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from atom_patches.core import PatchError, Verdict, source
from atom_patches.core.conditions import refusals


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The overlay's warnings so far."""
    monkeypatch.setattr(logging.getLogger("atom_patches"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="atom_patches")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "atom_patches"]


def checks(config: Any) -> Iterator[str]:
    if config.pcp < 1:
        yield "pcp is below 1"
    if config.no_such_option:
        yield "no such option"


def test_refusals_are_the_lines_or_say_what_is_missing(make: Any) -> None:
    assert refusals(iter(["one", "two"])) == ["one", "two"]
    with pytest.raises(PatchError, match="asks for a feature, but cannot be judged: AttributeError: .*no_such_option"):
        refusals(checks(make.config(2)))


def asks_with_what_is_missing(config: Any) -> Verdict:
    return Verdict(not refusals(checks(config)), "asked")


def test_a_release_that_is_not_supported_is_named_before_any_option(toy: Any, make: Any) -> None:
    first = toy.patch("toy.g.one", "core:plain", supports="toy<1", group="toy.g", when=asks_with_what_is_missing)
    second = toy.patch("toy.g.two", "core:helper", supports="toy<1", group="toy.g", when=asks_with_what_is_missing)
    toy.arm(first, second, review=False)
    config = make.config(2)
    with pytest.raises(PatchError) as stopped:
        toy.configure(config)
    head, *problems = str(stopped.value).splitlines()
    assert head == "atom_patches stops the launch of toy 1.0.0:"
    (line,) = problems
    assert line.startswith("  - toy.g (correctness, unsupported): toy 1.0.0 was not reviewed, and the code there")
    assert "toy.g.one (and 1 more)" in line and "Install toy<1" in line and "explain toy.g" in line


def test_a_supported_release_says_what_is_missing(toy: Any, make: Any) -> None:
    toy.arm(toy.patch("toy.a", "core:plain", when=asks_with_what_is_missing))
    config = make.config(2)
    with pytest.raises(PatchError, match="cannot be judged.*no_such_option"):
        toy.configure(config)


def test_what_the_engine_does_by_itself_is_never_refused(toy: Any, make: Any) -> None:
    def upstreamed(version: str) -> Verdict:
        return Verdict(True, f"toy {version} does it")

    def refuses(config: Any) -> Verdict:
        raise PatchError("the patch does not serve this option")

    toy.arm(toy.patch("toy.a", "core:plain", when=refuses, upstreamed=upstreamed))
    config = make.config(2)
    toy.configure(config)
    assert toy.states() == {"toy.a": "inactive"} and toy.reason("toy.a") == "toy 1.0.0 does it"


def test_an_open_question_on_another_release_is_one_warning(toy: Any, make: Any, warnings: Any) -> None:
    def cannot_say(config: Any) -> Verdict:
        return Verdict(config.no_such_option > 1, "")

    toy.arm(
        toy.patch("toy.g.one", "core:plain", supports="toy<1", group="toy.g", when=cannot_say),
        toy.patch("toy.g.two", "core:helper", supports="toy<1", group="toy.g", when=cannot_say),
    )
    first, second = make.config(2), make.config(2)
    toy.configure(first)
    toy.configure(second)
    (told,) = warnings()
    assert told.startswith("toy.g is not applied, and whether this configuration asks for it is not known")


class Sealed:
    """A configuration that takes no weak references."""

    __slots__ = ("pcp",)

    def __init__(self, pcp: int) -> None:
        self.pcp = pcp


def test_a_configuration_without_weak_references_lasts_until_it_is_released(toy: Any) -> None:
    core = toy.load("core")
    stock = core.plain
    toy.arm(toy.patch("toy.a", "core:plain", when=lambda config: Verdict(config.pcp > 1, "above 1")))
    config, other = Sealed(2), Sealed(1)
    toy.registry.configure("toy", config, "engine")
    assert core.plain is not stock
    toy.registry.release("toy", config)
    toy.registry.configure("toy", other, "engine")
    assert core.plain is stock


def test_probes_read_the_source(toy: Any) -> None:
    plain = f"{toy.name}.core:plain"
    assert source.defined(plain).ok and plain in source.defined(plain).reason
    assert not source.defined(f"{toy.name}.core:gone").ok
    assert source.mentions(plain, "return x + y").ok
    assert source.mentions(plain, "return x - y") == Verdict(False, f"{plain} lacks return x - y")
    assert not source.mentions(f"{toy.name}.core:gone", "return").ok
