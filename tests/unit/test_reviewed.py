"""The files of reviewed fingerprints: what is written, what is read, and the drill after an upstream change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom_patches.core import PatchError, State, gates, reviewed


def edit(toy: Any) -> None:
    core = toy.root / toy.name / "core.py"
    core.write_text(core.read_text().replace("return x + y", "return x + y + 0"))


def test_drill(toy: Any, make: Any) -> None:
    """Upstream changes one line: drifted, with the line; accepted after review: applied."""
    patch = toy.patch("toy.a", "core:plain")
    toy.review(patch)
    edit(toy)
    finding = gates.fits(toy.engine, patch)
    assert finding.state is not State.PENDING
    assert [detail.rpartition(": ")[2] for detail in finding.details] == ["- 1 reviewed line(s)", "+ return x + y + 0"]
    toy.arm(patch, review=False)
    config = make.config(2)
    with pytest.raises(PatchError, match=r"return x \+ y \+ 0|reviewed line"):
        toy.configure(config)
    assert toy.states() == {"toy.a": "drifted"}

    assert reviewed.accept(toy.engine, [patch], "1.0.0") == [patch.site]
    toy.configure(config)
    assert toy.load("core").plain(1) == 102
    assert toy.states() == {"toy.a": "applied"}


def test_accepting_again_adds_nothing(toy: Any) -> None:
    patch = toy.patch("toy.a", "core:plain", relies_on=("core:helper",))
    assert [str(target) for target in reviewed.accept(toy.engine, [patch], "1.0.0")] == [
        f"{toy.name}.core:plain",
        f"{toy.name}.core:helper",
    ]
    assert reviewed.accept(toy.engine, [patch], "1.0.1") == []


def test_accepting_what_is_shipped_adds_nothing(toy: Any, tmp_path: Path) -> None:
    patch = toy.patch("toy.a", "core:plain")
    toy.review(patch)
    assert reviewed.accept(toy.engine, [patch], "1.0.0") == []
    assert not (tmp_path / "accepted.json").exists()


def test_a_source_that_was_reviewed_for_another_patch_does_not_count(toy: Any) -> None:
    """A version was reviewed for a patch if all of the patch's targets were, in that version."""
    both = toy.patch("toy.a", "core:plain", relies_on=("core:helper",))
    one = toy.patch("toy.b", "core:plain")
    toy.review(both)
    edit(toy)
    reviewed.ship(toy.engine, [one], "1.1.0")
    assert gates.fits(toy.engine, one).state is State.PENDING
    assert gates.fits(toy.engine, both).state is not State.PENDING
    assert reviewed.accept(toy.engine, [one], "1.1.0") == []
    assert reviewed.accept(toy.engine, [both], "1.1.0") == [both.site]
    assert gates.fits(toy.engine, both).state is State.PENDING


def either(toy: Any) -> Any:
    """A patch that fits two releases: one has `user`, another has not, but `late`, and both do without `gone`."""
    sets = (("user:first", "gone:g"), ("late:late",), ("core:helper",))
    named = tuple(tuple(f"{toy.name}.{text}" for text in one) for one in sets)
    return toy.patch("toy.a", "core:plain", relies_on_one_of=named)


def test_of_sets_the_first_that_the_engine_has_whole_counts(toy: Any) -> None:
    patch = either(toy)
    assert len(reviewed.targets(patch)) == 5
    assert [target.module.rpartition(".")[2] for target in reviewed.installed(patch)] == ["core", "late"]
    file = reviewed.ship(toy.engine, [patch], "1.0.0")
    assert len(json.loads(file.read_text())) == 2
    assert gates.fits(toy.engine, patch).state is State.PENDING


def test_a_set_that_changed_is_not_made_up_for_by_another(toy: Any) -> None:
    patch = either(toy)
    toy.review(patch, toy.patch("toy.b", "core:helper"))
    toy.write("late", "def late(x):\n    return x + 1000\n")
    finding = gates.fits(toy.engine, patch)
    assert finding.state is not State.PENDING and "late:late changed" in finding.reason


def test_an_engine_with_none_of_the_sets_is_told_of_the_first(toy: Any) -> None:
    sets = tuple((f"{toy.name}.{text}",) for text in ("gone:f", "gone:g"))
    patch = toy.patch("toy.a", "core:plain", relies_on_one_of=sets)
    toy.review(toy.patch("toy.b", "core:plain"))
    finding = gates.fits(toy.engine, patch)
    assert finding.state is not State.PENDING and "gone:f is gone" in finding.reason


def test_each_version_is_reviewed_with_the_set_that_it_has(toy: Any) -> None:
    """The file of a version has one of the sets, and counts for the patch."""
    patch = either(toy)
    toy.review(patch)
    (toy.root / toy.name / "late.py").unlink()
    reviewed.ship(toy.engine, [patch], "2.0.0")
    assert gates.fits(toy.engine, patch).state is State.PENDING
    assert set(reviewed.fingerprints(toy.engine, patch.site, patch)) == {"1.0.0", "2.0.0"}


def test_accepting_another_version_keeps_the_first(toy: Any, tmp_path: Path) -> None:
    patch = toy.patch("toy.a", "core:plain")
    reviewed.accept(toy.engine, [patch], "1.0.0")
    edit(toy)
    reviewed.accept(toy.engine, [patch], "1.1.0")
    content = json.loads((tmp_path / "accepted.json").read_text())
    assert sorted(content["toy"][patch.target]) == ["1.0.0", "1.1.0"]


def test_shipped_file_is_named_by_the_public_version_and_keeps_other_targets(toy: Any) -> None:
    first, second = toy.patch("toy.a", "core:plain"), toy.patch("toy.b", "late:late")
    file = reviewed.ship(toy.engine, [first], "1.0.0+cpu")
    assert file.name == "1.0.0.json"
    reviewed.ship(toy.engine, [second], "1.0.0")
    assert sorted(json.loads(file.read_text())) == sorted([first.target, second.target])
    reviewed.ship(toy.engine, [second], "1.0.0", complete=True)
    assert list(json.loads(file.read_text())) == [second.target]
    assert toy.name not in file.read_text().replace(second.target, "")


def test_no_upstream_text_is_kept(toy: Any) -> None:
    file = reviewed.ship(toy.engine, [toy.patch("toy.a", "core:Base")], "1.0.0")
    assert "def method" not in file.read_text() and "return" not in file.read_text()


@pytest.mark.parametrize("content", ["[]", "{", '{"toy": 3}'])
def test_damaged_file_is_named(toy: Any, tmp_path: Path, content: str) -> None:
    patch = toy.patch("toy.a", "core:plain")
    (tmp_path / "accepted.json").write_text(content)
    with pytest.raises(PatchError, match=r"accepted\.json is not a file of fingerprints"):
        reviewed.fingerprints(toy.engine, patch.site)


def test_unwritable_place_is_named(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATOM_PATCHES_ACCEPTED", str(tmp_path / "file" / "accepted.json"))
    with pytest.raises(PatchError, match="cannot be"):
        reviewed.accept(toy.engine, [toy.patch("toy.a", "core:plain")], "1.0.0")
