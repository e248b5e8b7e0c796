"""Decisions and what follows from them, on a made-up engine: groups, states, instances, surprises."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom_patches.core import PatchError, Verdict
from atom_patches.core.patch import State


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The overlay's warnings so far."""
    monkeypatch.setattr(logging.getLogger("atom_patches"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="atom_patches")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "atom_patches"]


def pair(toy: Any, **facts: Any) -> tuple[Any, Any]:
    """A group of two patches in two modules."""
    first = toy.patch("toy.g.plain", "core:plain", group="toy.g", **facts)
    second = toy.patch("toy.g.late", "late:late", group="toy.g", **facts)
    return first, second


# When the target is imported, relative to everything else


# A configuration reaches the registry through hooks, which arming puts in place: it never comes first.
ORDERS = [
    order
    for order in itertools.permutations(["arm", "import", "configure"])
    if order.index("arm") < order.index("configure")
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_order_of_arming_importing_and_configuring(toy: Any, make: Any, order: tuple[str, ...]) -> None:
    patch = toy.patch("toy.a", "core:plain")
    config = make.config(2)
    steps = {
        "arm": lambda: toy.arm(patch),
        "import": lambda: toy.load("core"),
        "configure": lambda: toy.configure(config),
    }
    for step in order:
        steps[step]()
    assert toy.load("core").plain(1) == 102
    assert toy.states() == {"toy.a": "applied"}


def test_arming_imports_nothing_of_the_engine(toy: Any) -> None:
    toy.arm(toy.patch("toy.a", "core:plain"))
    assert not [name for name in sys.modules if name.partition(".")[0] == toy.name]
    assert toy.states() == {"toy.a": "pending"}
    assert "no engine configuration" in toy.reason("toy.a")


def test_twice_is_once(toy: Any, make: Any) -> None:
    patch = toy.patch("toy.a", "core:plain")
    core = toy.load("core")
    config = make.config(2)
    toy.arm(patch)
    toy.arm(patch)
    toy.configure(config)
    once = core.plain
    toy.configure(config)
    toy.configure(config, "worker")
    assert core.plain is once
    assert core.plain(1) == 102


def test_patch_without_condition_applies_before_any_configuration(toy: Any) -> None:
    toy.arm(toy.patch("toy.a", "core:plain", when=None))
    assert toy.load("core").plain(1) == 102


def test_bootstrap_patch_needs_no_reviewed_source(toy: Any) -> None:
    toy.arm(toy.patch("toy.bootstrap.a", "core:plain", kind="bootstrap", when=None), review=False)
    assert toy.load("core").plain(1) == 102


def test_waiting_patch_says_what_it_waits_for(toy: Any, make: Any) -> None:
    toy.arm(toy.patch("toy.a", "late:late"))
    config = make.config(2)
    toy.configure(config)
    assert toy.states() == {"toy.a": "pending"}
    assert f"{toy.name}.late" in toy.reason("toy.a")


def test_refusing_condition_stops_the_launch_with_one_message(toy: Any, make: Any) -> None:
    def refuse(config: Any) -> Verdict:
        raise PatchError("--option cannot be served:\n  - turn it off")

    toy.arm(toy.patch("toy.a", "core:plain", when=refuse))
    with pytest.raises(PatchError, match="stops the launch of toy") as stop:
        toy.configure(make.config(2))
    assert str(stop.value).splitlines()[1:] == ["  - --option cannot be served:", "    - turn it off"]
    assert sys.excepthook.__module__ == "atom_patches.core.stop"


def test_import_by_a_builder_and_by_threads(toy: Any, make: Any) -> None:
    """A builder imports another target's module; a thread imports a third at the same time."""
    started, finished = threading.Event(), threading.Event()

    def builder(original: Any) -> Any:
        def importing() -> None:
            started.set()
            toy.load("user")
            finished.set()

        threading.Thread(target=importing).start()
        started.wait(10)
        assert finished.wait(10), "the thread waits for the patches, which wait for the thread"
        toy.load("late")
        return make.plus(100)(original)

    toy.load("core")
    patches = [
        toy.patch("toy.g.a", "core:plain", builder, group="toy.g", order=1),
        toy.patch("toy.g.b", "late:late", group="toy.g"),
        toy.patch("toy.g.c", "user:use", group="toy.g"),
    ]
    toy.arm(*patches)
    config = make.config(2)
    toy.configure(config)
    assert set(toy.states().values()) == {"applied"}
    assert (toy.load("late").late(1), toy.load("user").use(1)) == (101, 202)


def test_import_that_finds_the_lock_taken_is_never_forgotten(
    toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's holder lets go, and looks for postponed modules, at the moment in which an import fails to get it."""
    toy.arm(toy.patch("toy.a", "late:late"))
    config = make.config(2)
    toy.configure(config)
    lock, tries = threading.Lock(), itertools.count()

    class LetGo:
        def acquire(self, blocking: bool) -> bool:
            if next(tries):
                return lock.acquire(blocking)
            toy.registry._catch_up()
            return False

        def release(self) -> None:
            lock.release()

    monkeypatch.setattr(toy.registry, "_lock", LetGo())
    assert toy.load("late").late(1) == 101


# Copies


def test_copies_are_rebound_and_given_back(toy: Any, make: Any) -> None:
    core, user = toy.load("core"), toy.load("user")
    original = core.plain
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(2)
    toy.configure(config)
    assert user.plain is core.plain is not original
    assert user.use(1) == 102
    toy.registry.revert("toy")
    assert user.plain is core.plain is original


def test_copy_made_while_patched_is_given_back_too(toy: Any, make: Any) -> None:
    core = toy.load("core")
    original = core.plain
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(2)
    toy.configure(config)
    user = toy.load("user")
    assert user.plain is core.plain
    toy.registry.revert("toy")
    assert user.plain is core.plain is original


def test_patch_of_a_copy_leaves_the_definition_alone(toy: Any, make: Any) -> None:
    core, user = toy.load("core"), toy.load("user")
    original = core.plain
    toy.arm(toy.patch("toy.a", "user:plain"))
    config = make.config(2)
    toy.configure(config)
    assert core.plain is original and user.use(1) == 102
    toy.registry.revert("toy")
    assert user.plain is original


def test_equal_constants_elsewhere_are_no_copies(toy: Any, make: Any) -> None:
    core, user = toy.load("core"), toy.load("user")
    user.ELSEWHERE = core.LIMIT
    toy.arm(toy.patch("toy.a", "core:LIMIT", lambda original: original + 1))
    config = make.config(2)
    toy.configure(config)
    assert (core.LIMIT, user.ELSEWHERE) == (4, 3)
    toy.registry.revert("toy")
    assert (core.LIMIT, user.ELSEWHERE) == (3, 3)


def test_what_cannot_be_rebound_is_reported(toy: Any, make: Any) -> None:
    core, _ = toy.load("core"), toy.load("user")
    toy.arm(
        toy.patch("toy.a", "core:plain"), toy.patch("toy.b", "core:Base.method"), toy.patch("toy.c", "core:Child.other")
    )
    config = make.config(2)
    toy.configure(config)
    notes = toy.registry.overlay("toy").notes
    assert any("core:plain" in note and "dict of 1 items" in note for note in notes), notes
    assert any("core:Base.method" in note and "core.Own overrides it" in note for note in notes), notes
    assert len(notes) == 2, notes
    assert core.Own().method(1) == -1


# Groups


def test_group_waits_for_all_facts_before_anything_is_applied(toy: Any, make: Any) -> None:
    """The second member's source is unknown: the first, which fits, is not applied either."""
    core = toy.load("core")
    original = core.plain
    first, second = pair(toy)
    toy.review(first)
    toy.arm(first, second, review=False)
    config = make.config(2)
    with pytest.raises(PatchError, match="toy.g.late"):
        toy.configure(config)
    assert core.plain is original
    assert toy.states() == {"toy.g.plain": "inactive", "toy.g.late": "drifted"}
    assert "held back by toy.g.late" in toy.reason("toy.g.plain")


def test_member_that_fails_takes_the_applied_ones_back(toy: Any, make: Any) -> None:
    core, late, user = toy.load("core"), toy.load("late"), toy.load("user")
    original = core.plain

    def builder(original: Any) -> Any:
        raise ImportError("no adapter")

    first = toy.patch("toy.g.a", "core:plain", group="toy.g")
    second = toy.patch("toy.g.b", "late:late", builder, group="toy.g")
    toy.arm(first, second)
    config = make.config(2)
    with pytest.raises(PatchError, match="ImportError: no adapter"):
        toy.configure(config)
    assert core.plain is user.plain is original
    assert late.late(1) == 1
    assert toy.states() == {"toy.g.a": "inactive", "toy.g.b": "failed"}


def test_member_that_fails_at_a_later_import_takes_the_group_back(toy: Any, make: Any) -> None:
    core = toy.load("core")
    original = core.plain
    first = toy.patch("toy.g.a", "core:plain", group="toy.g")
    second = toy.patch("toy.g.b", "late:late", lambda original: None, group="toy.g")
    toy.arm(first, second)
    config = make.config(2)
    toy.configure(config)
    assert toy.states() == {"toy.g.a": "applied", "toy.g.b": "pending"}
    with pytest.raises(PatchError, match="toy.g.b"):
        toy.load("late")
    assert core.plain is original
    assert toy.states() == {"toy.g.a": "inactive", "toy.g.b": "failed"}


def test_failure_in_an_import_that_the_engine_survives_is_raised_again(toy: Any, make: Any) -> None:
    toy.arm(toy.patch("toy.a", "late:late", lambda original: None))
    toy.registry.confirm("toy")
    config = make.config(2)
    toy.configure(config)
    toy.registry.confirm("toy")
    with contextlib.suppress(PatchError):
        toy.load("late")
    toy.configure(config, "worker")  # the engine goes on to its next process role
    with pytest.raises(PatchError, match="toy.a"):
        toy.registry.confirm("toy")
    toy.registry.release("toy", config)
    toy.registry.confirm("toy")


def test_engines_that_were_not_armed_have_nothing_to_confirm(toy: Any) -> None:
    toy.registry.confirm("toy")


def test_optimisation_group_that_fails_later_is_taken_back_with_a_warning(toy: Any, make: Any, warnings: Any) -> None:
    core = toy.load("core")
    original = core.plain
    first = toy.patch("toy.g.a", "core:plain", group="toy.g", kind="optimisation")
    second = toy.patch("toy.g.b", "late:late", lambda original: None, group="toy.g", kind="optimisation")
    toy.arm(first, second)
    config = make.config(2)
    toy.configure(config)
    assert toy.load("late").late(1) == 1
    assert core.plain is original
    assert len(warnings()) == 1 and "toy.g is not applied" in warnings()[0]


def test_member_that_upstream_made_unnecessary_does_not_hold_the_group_back(toy: Any, make: Any) -> None:
    core, late = toy.load("core"), toy.load("late")
    first = toy.patch("toy.g.a", "core:plain", group="toy.g")
    second = toy.patch(
        "toy.g.b", "late:late", group="toy.g", upstreamed=lambda version: Verdict(version == "1.0.0", "fixed in 1.0")
    )
    toy.arm(first, second)
    config = make.config(2)
    toy.configure(config)
    assert toy.states() == {"toy.g.a": "applied", "toy.g.b": "upstreamed"}
    assert (core.plain(1), late.late(1)) == (102, 1)


def test_members_of_a_group_may_have_conditions_of_their_own(toy: Any, make: Any) -> None:
    toy.load("core")
    toy.load("late")
    first = toy.patch("toy.g.a", "core:plain", group="toy.g")
    second = toy.patch("toy.g.b", "late:late", group="toy.g", when=lambda config: Verdict(config.pcp > 2, "two ranks"))
    toy.arm(first, second)
    config = make.config(2)
    toy.configure(config)
    assert toy.states() == {"toy.g.a": "applied", "toy.g.b": "inactive"}
    assert toy.reason("toy.g.b") == "two ranks"


def test_patches_of_different_groups_meet_at_one_target(toy: Any, make: Any) -> None:
    core, user = toy.load("core"), toy.load("user")
    original = core.plain
    a = toy.patch("toy.a", "core:plain")
    b = toy.patch("toy.b", "core:plain", make.plus(1000), when=lambda config: Verdict(config.pcp > 2, "few ranks"))
    toy.arm(a, b)
    big, small = make.config(4), make.config(2)
    toy.configure(big)
    assert core.plain(1) == 1102 and user.plain is core.plain
    del big
    toy.configure(small)
    assert core.plain(1) == 102 and user.plain is core.plain
    toy.registry.revert("toy")
    assert core.plain is user.plain is original


# Engine instances


def test_next_engine_of_the_process_gets_the_stock_objects(toy: Any, make: Any) -> None:
    core, user = toy.load("core"), toy.load("user")
    original = core.plain
    toy.arm(toy.patch("toy.a", "core:plain"))
    first = make.config(2)
    toy.configure(first)
    assert core.plain is not original
    del first
    second = make.config(1)
    toy.configure(second)
    assert core.plain is user.plain is original
    assert toy.states() == {"toy.a": "inactive"}
    assert toy.reason("toy.a") == "pcp is 1"


def test_dropped_engine_in_a_reference_cycle_counts_as_dropped(toy: Any, make: Any) -> None:
    core = toy.load("core")
    original = core.plain
    toy.arm(toy.patch("toy.a", "core:plain"))
    first = make.config(2)
    first.itself = first
    toy.configure(first)
    gc.disable()
    try:
        del first
        second = make.config(1)
        toy.configure(second)
    finally:
        gc.enable()
    assert core.plain is original


def test_patch_stays_while_an_engine_that_wants_it_lives(toy: Any, make: Any) -> None:
    core = toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain"))
    first, second = make.config(2), make.config(1)
    toy.configure(first)
    toy.configure(second)
    assert core.plain(1) == 102
    assert toy.states() == {"toy.a": "applied"}


def test_equal_configurations_are_different_engines(toy: Any, make: Any) -> None:
    core = toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain"))
    first, second = make.config(2), make.config(2)
    toy.configure(first)
    toy.configure(second)
    del first
    third = make.config(1)
    toy.configure(third)
    assert core.plain(1) == 102
    assert second.pcp == 2


def test_refused_engine_leaves_no_wish_behind(toy: Any, make: Any) -> None:
    core = toy.load("core")
    original = core.plain
    toy.arm(toy.patch("toy.a", "core:plain"), review=False)
    refused, good = make.config(2), make.config(1)
    with pytest.raises(PatchError):
        toy.configure(refused)
    toy.configure(good)
    assert core.plain is original
    assert refused.pcp == 2


def test_refused_engine_takes_nothing_from_a_living_one(toy: Any, make: Any) -> None:
    core = toy.load("core")
    first, second = pair(toy)
    third = toy.patch("toy.g.more", "core:helper", group="toy.g", when=lambda config: Verdict(config.pcp > 2, "few"))
    toy.review(first, second)
    toy.arm(first, second, third, review=False)
    good, refused = make.config(2), make.config(4)
    toy.configure(good)
    with pytest.raises(PatchError, match="toy.g.more"):
        toy.configure(refused)
    assert core.plain(1) == 102
    assert toy.load("late").late(1) == 101
    assert toy.states() == {"toy.g.plain": "applied", "toy.g.late": "applied", "toy.g.more": "drifted"}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_of_engines_leaves_exactly_what_the_living_want(toy: Any, make: Any, data: Any) -> None:
    core, user, late = toy.load("core"), toy.load("user"), toy.load("late")
    if not hasattr(toy, "originals"):
        toy.originals = (core.plain, late.late)
        wanted = {"toy.g.plain": 2, "toy.g.late": 3, "toy.single": 4}
        targets = {"toy.g.plain": "core:plain", "toy.g.late": "late:late", "toy.single": "core:plain"}
        toy.arm(
            *(
                toy.patch(
                    name,
                    targets[name],
                    make.plus(10**number),
                    group="toy.g" if ".g." in name else None,
                    when=lambda config, number=number: Verdict(config.pcp >= number, "few ranks"),
                )
                for name, number in wanted.items()
            )
        )
    plain, slow = toy.originals
    toy.registry.revert("toy")
    living: list[Any] = []
    for _ in range(data.draw(st.integers(1, 6))):
        if living and data.draw(st.booleans()):
            living.pop(data.draw(st.integers(0, len(living) - 1)))
        living.append(make.config(data.draw(st.integers(1, 4))))
        toy.configure(living[-1])
        most = max(config.pcp for config in living)
        assert core.plain(0) == 1 + (100 if most >= 2 else 0) + (10**4 if most >= 4 else 0)
        assert late.late(0) == (1000 if most >= 3 else 0)
        assert user.plain is core.plain
        assert (core.plain is plain) == (most < 2) and (late.late is slow) == (most < 3)


# What cannot be applied


def test_what_was_asked_for_and_is_not_served_is_stock_and_one_warning(toy: Any, make: Any, warnings: Any) -> None:
    core = toy.load("core")
    original = core.plain
    toy.arm(*pair(toy, when=lambda config: Verdict(config.pcp < 3, "three ranks are too many", asked=True)))
    config = make.config(3)
    for role in ("engine", "worker"):
        toy.configure(config, role)
    assert core.plain is original and set(toy.states().values()) == {"inactive"}
    (message,) = warnings()
    assert "toy.g is not applied" in message and "three ranks are too many" in message


def test_what_was_not_asked_for_is_no_warning(toy: Any, make: Any, warnings: Any) -> None:
    toy.arm(*pair(toy, when=lambda config: Verdict(False, "nobody asked")))
    toy.configure(make.config(3))
    assert not warnings()


def test_optimisation_that_does_not_fit_is_stock_and_one_warning(toy: Any, make: Any, warnings: Any) -> None:
    core = toy.load("core")
    original = core.plain
    toy.arm(toy.patch("toy.a", "core:plain", kind="optimisation"), review=False)
    config = make.config(2)
    toy.configure(config)
    toy.configure(config, "worker")
    assert core.plain is original
    assert toy.states() == {"toy.a": "drifted"}
    assert len(warnings()) == 1 and "toy.a is not applied" in warnings()[0]


def test_strict_turns_the_warning_into_a_stop(toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCHES_STRICT", "1")
    toy.arm(toy.patch("toy.a", "core:plain", kind="optimisation"), review=False)
    config = make.config(2)
    with pytest.raises(PatchError, match="ATOM_PATCHES_STRICT=1"):
        toy.configure(config)


def test_required_optimisation_stops_the_launch(toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCH_TOY_A", "1")
    toy.arm(toy.patch("toy.a", "core:plain", kind="optimisation"), review=False)
    config = make.config(2)
    with pytest.raises(PatchError, match=r"toy\.a \(optimisation, drifted\)"):
        toy.configure(config)


def test_required_feature_that_the_configuration_does_not_ask_for_stops_the_launch(
    toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_PATCH_TOY_G", "1")
    toy.arm(*pair(toy))
    config = make.config(1)
    with pytest.raises(PatchError, match="ATOM_PATCH_TOY_G=1 requires it, but pcp is 1"):
        toy.configure(config)
    other = make.config(2)
    toy.configure(other)


def test_one_message_names_every_problem(toy: Any, make: Any) -> None:
    toy.arm(toy.patch("toy.a", "core:plain"), toy.patch("toy.b", "core:gone"), review=False)
    config = make.config(2)
    with pytest.raises(PatchError) as stop:
        toy.configure(config)
    message = str(stop.value)
    assert message.startswith("atom_patches stops the launch of toy 1.0.0:\n")
    assert "toy.a (correctness, drifted): no reviewed source of" in message
    assert "does not define gone" in message
    assert "accept toy.a" in message and "Install toy>=1,<2" in message
    assert sys.excepthook.__module__ == "atom_patches.core.stop"


def test_switched_off_is_stock_whatever_the_configuration(toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCH_TOY_G", "0")
    core = toy.load("core")
    toy.arm(*pair(toy))
    config = make.config(2)
    toy.configure(config)
    assert core.plain(1) == 2
    assert toy.states() == {"toy.g.plain": "off", "toy.g.late": "off"}
    assert toy.reason("toy.g.late") == "ATOM_PATCH_TOY_G=0"


def test_master_switch_wins(toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PATCHES", "0")
    monkeypatch.setenv("ATOM_PATCH_TOY_A", "1")
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(1)
    toy.configure(config)
    assert toy.load("core").plain(1) == 2
    assert toy.registry.status("toy") == []


def test_value_that_is_not_allowed_stops_the_launch(toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.arm(toy.patch("toy.a", "core:plain"))
    monkeypatch.setenv("ATOM_PATCH_TOY_A", "yes")
    config = make.config(1)
    with pytest.raises(PatchError, match="ATOM_PATCH_TOY_A='yes' is not allowed"):
        toy.configure(config)


def test_misspelt_variable_is_reported(toy: Any, make: Any, monkeypatch: pytest.MonkeyPatch, warnings: Any) -> None:
    monkeypatch.setenv("ATOM_PATCH_TOY_AA", "1")
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(1)
    toy.configure(config)
    assert any("did you mean ATOM_PATCH_TOY_A?" in message for message in warnings())


def test_undecidable_condition_stops_a_reviewed_engine_only(toy: Any, make: Any) -> None:
    def asks_for_more(config: Any) -> Verdict:
        return Verdict(config.no_such_option > 1, "")

    old = toy.patch("toy.old", "core:plain", supports="toy<1", when=asks_for_more)
    toy.arm(old)
    config = make.config(1)
    toy.configure(config)
    assert toy.states() == {"toy.old": "inactive"}
    assert "no_such_option" in toy.reason("toy.old")

    toy.registry.__init__()
    toy.arm(toy.patch("toy.new", "core:plain", when=asks_for_more))
    with pytest.raises(PatchError, match="no_such_option"):
        toy.configure(config)


def test_unreadable_file_of_fingerprints_stops_the_launch(toy: Any, make: Any, tmp_path: Path) -> None:
    toy.arm(toy.patch("toy.a", "core:plain"))
    (tmp_path / "accepted.json").write_text("{")
    config = make.config(2)
    with pytest.raises(PatchError, match=r"accepted\.json is not a file of fingerprints"):
        toy.configure(config)


# Versions and sources


@pytest.mark.parametrize(
    ("supports", "reviewed", "state"),
    [
        ("toy>=1,<2", True, "applied"),
        ("toy>=1,<2", False, "drifted"),
        ("toy>=2", True, "applied"),
        ("toy>=2", False, "unsupported"),
    ],
)
def test_source_outranks_version(toy: Any, make: Any, supports: str, reviewed: bool, state: str) -> None:
    toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain", supports=supports, kind="optimisation"), review=reviewed)
    config = make.config(2)
    toy.configure(config)
    assert toy.states() == {"toy.a": state}
    if (supports, reviewed) == ("toy>=2", True):
        assert "toy 1.0.0 is not in >=2, but the source is as reviewed" in toy.reason("toy.a")


def test_changed_dependency_counts_like_a_changed_target(toy: Any, make: Any) -> None:
    patch = toy.patch("toy.a", "core:plain", relies_on=("core:helper",))
    toy.review(patch)
    core = toy.root / toy.name / "core.py"
    core.write_text(core.read_text().replace("def helper(x):\n    return x", "def helper(x):\n    return x + 1"))
    toy.arm(patch, review=False)
    config = make.config(2)
    with pytest.raises(PatchError, match=r"core:helper changed \(.*core\.py:\d+: "):
        toy.configure(config)


# Other people's patches


def test_foreign_replacement_under_ours_is_named(toy: Any, make: Any) -> None:
    core = toy.load("core")
    stock = core.plain

    def theirs(x: int, *, y: int = 1) -> int:
        return stock(x, y=y) + 5

    core.plain = theirs
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(2)
    toy.configure(config)
    assert core.plain(1) == 107
    assert "theirs" in toy.reason("toy.a") and "test_registry.py" in toy.reason("toy.a")
    toy.registry.revert("toy")
    assert core.plain is theirs


def test_foreign_wrapper_that_names_what_it_wraps_is_named_too(toy: Any, make: Any) -> None:
    core = toy.load("core")
    core.plain = core.decorate(core.plain)
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(2)
    toy.configure(config)
    assert "someone put in the place" in toy.reason("toy.a")


@pytest.mark.parametrize("target", ["core:plain", "core:decorated", "core:Base.cls", "core:Child.method", "user:plain"])
def test_the_engines_own_function_is_not_called_foreign(toy: Any, make: Any, target: str) -> None:
    toy.load("core")
    toy.load("user")
    toy.arm(toy.patch("toy.a", target))
    config = make.config(2)
    toy.configure(config)
    assert "someone" not in toy.reason("toy.a")


def test_displaced_patch_is_seen_on_the_live_object(toy: Any, make: Any) -> None:
    core = toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(2)
    toy.configure(config)

    def theirs(x: int) -> int:
        return 0

    core.plain = theirs
    assert toy.states() == {"toy.a": State.DISPLACED.value}
    assert "theirs" in toy.reason("toy.a")
    other = make.config(2)
    with pytest.raises(PatchError, match="displaced"):
        toy.configure(other)
    assert core.plain is theirs


def test_wrapper_around_ours_is_displacement_without_a_stop(toy: Any, make: Any) -> None:
    core = toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain"))
    config = make.config(2)
    toy.configure(config)
    core.plain = core.decorate(core.plain)
    toy.configure(config, "worker")
    assert toy.states() == {"toy.a": "displaced"}
    assert core.plain(1) == 102


# What the process says


def test_state_file_has_every_patch_with_a_reason(toy: Any, make: Any, tmp_path: Path) -> None:
    toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain"), toy.patch("toy.b", "late:late"))
    config = make.config(2)
    toy.configure(config, "api server")
    (file,) = (tmp_path / "state").glob("*.json")
    content = json.loads(file.read_text())
    assert {patch["id"]: patch["state"] for patch in content["patches"]} == {"toy.a": "applied", "toy.b": "pending"}
    assert all(patch["reason"] for patch in content["patches"])
    assert (content["engine"], content["version"], content["config"]) == ("toy", "1.0.0", {"pcp": "2"})
    toy.load("late")
    assert {patch["state"] for patch in json.loads(file.read_text())["patches"]} == {"applied"}


def test_only_active_graph_changes_enter_the_cache_key(toy: Any, make: Any) -> None:
    toy.load("core")
    graph = toy.patch("toy.graph", "core:plain", changes_graph=True)
    waiting = toy.patch("toy.waiting", "late:late", changes_graph=True)
    other = toy.patch("toy.other", "core:helper")
    never = toy.patch("toy.never", "core:helper", changes_graph=True, when=lambda config: Verdict(False, "never"))
    fixed = toy.patch(
        "toy.fixed", "core:helper", changes_graph=True, upstreamed=lambda version: Verdict(True, "fixed in 1.0")
    )
    toy.arm(graph, waiting, other, never, fixed)
    on, off = make.config(2), make.config(1)
    toy.configure(on)
    assert sorted(toy.bound[-1]) == ["toy.graph", "toy.waiting"]
    key = toy.bound[-1]
    toy.load("late")
    toy.configure(on, "worker")
    assert toy.bound[-1] == key
    del on
    toy.configure(off)
    assert toy.bound[-1] == {}


def test_settings_by_which_graphs_differ_enter_the_cache_key(toy: Any, make: Any, monkeypatch: Any) -> None:
    toy.load("core")
    toy.arm(toy.patch("toy.graph", "core:plain", changes_graph=True, graph_settings=("ATOM_FUSIONS",)))
    config = make.config(2)
    keys: list[dict[str, str]] = []
    for asked in ("", "1", "0"):
        monkeypatch.setenv("ATOM_FUSIONS", asked)
        toy.configure(config)
        keys.append(toy.bound[-1])
    assert keys[0] == keys[1] != keys[2]


# The hooks that hand configurations over


def test_hook_that_finds_no_place_warns_and_lets_the_engine_be(toy: Any, warnings: Any) -> None:
    toy.arm(toy.patch("toy.bootstrap.a", "core:gone", kind="bootstrap", when=None), review=False)
    assert toy.load("core").plain(1) == 2
    assert toy.states() == {"toy.bootstrap.a": "failed"}
    assert len(warnings()) == 1 and "core:gone does not exist" in warnings()[0]


def test_hook_that_finds_no_place_stops_a_launch_that_requires_a_feature(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_PATCH_TOY_A", "1")
    toy.review(feature := toy.patch("toy.a", "late:late"))
    toy.arm(toy.patch("toy.bootstrap.a", "core:gone", kind="bootstrap", when=None), feature, review=False)
    with pytest.raises(PatchError, match="core:gone does not exist"):
        toy.load("core")


def test_revert_keeps_the_hooks_unless_told(toy: Any, make: Any) -> None:
    core = toy.load("core")
    hook = toy.patch("toy.bootstrap.a", "core:plain", kind="bootstrap", when=None)
    toy.arm(hook, toy.patch("toy.b", "core:helper"))
    config = make.config(2)
    toy.configure(config)
    toy.registry.revert("toy")
    assert (core.plain(1), core.helper(1)) == (102, 1)
    toy.configure(config)
    assert core.helper(1) == 101
    toy.registry.revert("toy", bootstrap=True)
    assert (core.plain(1), core.helper(1)) == (2, 1)


def test_forked_child_does_not_wait_for_a_thread_of_its_parent(toy: Any, make: Any) -> None:
    import os

    core = toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain"))
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with toy.registry._lock:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    pid = os.fork()
    if pid == 0:
        config = make.config(2)
        toy.configure(config)
        os._exit(0 if core.plain(1) == 102 else 1)
    _, status = os.waitpid(pid, 0)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert core.plain(1) == 2


def test_an_engine_that_has_ended_wants_nothing_more(toy: Any, make: Any) -> None:
    patch = toy.patch("toy.a", "core:plain")
    module = toy.load("core")
    stock = module.plain
    toy.arm(patch)
    ended, living = make.config(2), make.config(2)
    for config in (ended, living):
        toy.configure(config)
    toy.registry.release("toy", ended)
    toy.configure(make.config(1))
    assert module.plain is not stock, "another engine still wants it"
    toy.registry.release("toy", living)
    last = make.config(1)
    toy.configure(last)
    assert module.plain is stock
    toy.registry.release("toy", last)
    toy.registry.release("toy", last)


def test_two_patches_of_one_module_that_is_imported_already(toy: Any) -> None:
    toy.load("core")
    toy.arm(toy.patch("toy.a", "core:plain", when=None), toy.patch("toy.b", "core:helper", when=None))
    assert toy.states() == {"toy.a": "applied", "toy.b": "applied"}
