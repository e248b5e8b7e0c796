"""One place and its chain of patches: what stands there, how it looks, and what comes back."""

from __future__ import annotations

import inspect
import pickle
import typing
from typing import Any

import pytest

from atom_patches.core import PatchError, Target
from atom_patches.core.site import Site


def site_of(toy: Any, qualname: str, module: str = "core") -> Site:
    return Site(Target(f"{toy.name}.{module}", qualname), toy.load(module))


CASES = [
    ("plain", lambda core: core.plain(1), 2),
    ("decorated", lambda core: core.decorated(1), 1),
    ("Base.method", lambda core: core.Base().method(1), 1),
    ("Base.stat", lambda core: core.Base.stat(1), 1),
    ("Base.prop", lambda core: core.Base().prop, 1),
    ("Child.method", lambda core: core.Child().method(1), 1),
    ("Child.stat", lambda core: core.Child.stat(1), 1),
]


@pytest.mark.parametrize(("qualname", "call", "stock"), CASES, ids=[case[0] for case in CASES])
def test_add_and_remove(toy: Any, qualname: str, call: Any, stock: int) -> None:
    core = toy.load("core")
    site = site_of(toy, qualname)
    before = site.live()
    patch = toy.patch("toy.a", f"core:{qualname}")
    assert call(core) == stock
    site.add(patch)
    assert call(core) == stock + 100
    site.remove(patch)
    assert call(core) == stock
    assert site.live() is before


def test_inherited_attribute_is_deleted_again_and_siblings_stay_stock(toy: Any) -> None:
    core = toy.load("core")
    site = site_of(toy, "Child.method")
    patch = toy.patch("toy.a", "core:Child.method")
    site.add(patch)
    assert (core.Child().method(1), core.Base().method(1)) == (101, 1)
    site.remove(patch)
    assert "method" not in vars(core.Child)


def test_classmethod_keeps_its_class(toy: Any) -> None:
    core = toy.load("core")

    def builder(original: Any) -> Any:
        def cls(cls: Any, x: Any) -> Any:
            return ("patched", *original(cls, x))

        return cls

    site_of(toy, "Base.cls").add(toy.patch("toy.a", "core:Base.cls", builder))
    assert core.Child.cls(3) == ("patched", "Child", 3)


@pytest.mark.parametrize("qualname", ["plain", "Base.method", "Base.stat", "Child.method"])
def test_looks_like_the_original(toy: Any, qualname: str) -> None:
    core = toy.load("core")
    site = site_of(toy, qualname)
    original = inspect.unwrap(core.Base.method if "method" in qualname else core.plain)
    site.add(toy.patch("toy.a", f"core:{qualname}"))
    owner, _, name = qualname.rpartition(".")
    function = getattr(getattr(core, owner) if owner else core, name)
    assert function.__name__ == name
    assert function.__qualname__ == qualname
    assert function.__module__ == core.__name__
    assert pickle.loads(pickle.dumps(function)) is function
    if name != "stat":
        assert function.__doc__ == original.__doc__
        assert inspect.signature(function) == inspect.signature(original)
        assert typing.get_type_hints(function) == typing.get_type_hints(original)


def test_marks_of_the_compiler_are_not_copied(toy: Any) -> None:
    core = toy.load("core")
    core.plain._torchdynamo_orig_callable = object()
    core.plain.mark = "kept"
    site_of(toy, "plain").add(toy.patch("toy.a", "core:plain"))
    assert core.plain.mark == "kept"
    assert not hasattr(core.plain, "_torchdynamo_orig_callable")


def test_chain_is_ordered_and_survives_a_removal_in_the_middle(toy: Any) -> None:
    core = toy.load("core")

    def times(factor: int) -> Any:
        def builder(original: Any) -> Any:
            def plain(x: int, *, y: int = 1) -> int:
                return original(x, y=y) * factor

            return plain

        return builder

    inner = toy.patch("toy.z", "core:plain", times(10), order=-1)
    first = toy.patch("toy.a", "core:plain")
    second = toy.patch("toy.b", "core:plain", times(2))
    site = site_of(toy, "plain")
    original = core.plain
    for patch in (second, inner, first):
        site.add(patch)
    assert core.plain(1) == ((2 * 10) + 100) * 2
    site.remove(first)
    assert core.plain(1) == 2 * 10 * 2
    site.remove(inner)
    site.remove(second)
    assert core.plain is original


@pytest.mark.parametrize("result", [lambda original: original, lambda original: 3, lambda original: None])
def test_unfit_replacement_is_refused_and_nothing_changes(toy: Any, result: Any) -> None:
    core = toy.load("core")
    before = core.plain
    with pytest.raises(PatchError, match="new plain function"):
        site_of(toy, "plain").add(toy.patch("toy.a", "core:plain", result))
    assert core.plain is before


def test_failing_builder_names_its_error(toy: Any) -> None:
    def builder(original: Any) -> Any:
        raise KeyError("adapter")

    with pytest.raises(PatchError, match="KeyError: 'adapter'"):
        site_of(toy, "plain").add(toy.patch("toy.a", "core:plain", builder))


@pytest.mark.parametrize(("qualname", "missing"), [("gone", "gone"), ("Base.gone", "gone"), ("Gone.method", "Gone")])
def test_missing_target_is_named(toy: Any, qualname: str, missing: str) -> None:
    with pytest.raises(PatchError, match=missing):
        site_of(toy, qualname)


def test_someone_elses_later_replacement_is_noticed_and_left_alone(toy: Any) -> None:
    core = toy.load("core")
    site = site_of(toy, "plain")
    patch = toy.patch("toy.a", "core:plain")
    site.add(patch)
    ours = core.plain

    def theirs(x: int) -> int:
        return 7

    core.plain = theirs
    assert site.displaced and not site.covered
    with pytest.raises(PatchError, match="theirs"):
        site.add(toy.patch("toy.b", "core:plain"))
    site.remove(patch)
    assert core.plain is theirs

    theirs.__wrapped__ = ours  # type: ignore[attr-defined]
    assert site.covered


def test_module_level_object_that_is_no_function(toy: Any) -> None:
    user = toy.load("user")
    before = user.TABLE
    site = site_of(toy, "TABLE", "user")
    patch = toy.patch("toy.a", "user:TABLE", lambda original: {**original, "more": 1})
    site.add(patch)
    assert sorted(user.TABLE) == ["more", "plain"]
    site.remove(patch)
    assert user.TABLE is before
