"""The AITER bindings against a stand-in made from AITER's recorded signatures and documented call sites."""

from __future__ import annotations

import sys
from typing import Any

import aiter_signatures
import aiter_stand_in
import harness
import pytest
from aiter_stand_in.cases import CASES, Case
from aiter_stand_in.checks import CONTRACTS, Violation
from aiter_stand_in.mutations import Call, Mutation, mutations

from atom_patches.kernels import aiter_binding, contract, registry

OLDER, NEWEST = aiter_stand_in.LANES
pytestmark = pytest.mark.skipif(harness.GPU, reason="the stand-in computes on the CPU")


def test_without_rocm_aiter_is_not_imported() -> None:
    assert not aiter_binding.available("cpu").ok
    assert "aiter" not in sys.modules


def test_the_stand_in_leaves_nothing_behind() -> None:
    before = list(sys.meta_path)
    with aiter_stand_in.installed():
        import aiter  # type: ignore[import-not-found]

        assert aiter_binding.available("cpu").ok and aiter.__spec__ is not None
    assert sys.meta_path == before
    assert not any(name == "aiter" or name.startswith("aiter.") for name in sys.modules)
    assert not aiter_binding.available("cpu").ok


def test_the_recorded_signatures_are_those_of_the_bindings() -> None:
    """tools/aiter_signatures.py has to be run again when a binding calls another function."""
    lanes = [set(aiter_stand_in.recorded(lane)) for lane in aiter_stand_in.LANES]
    assert set.union(*lanes) == set(aiter_signatures.wanted())


def test_every_bound_function_has_a_contract_a_call_site_and_a_case() -> None:
    called = {call[0] for lane in aiter_stand_in.LANES for case in CASES for call in record(case, lane)}
    for family, functions in aiter_signatures.bound_functions().items():
        assert functions, f"{family} has a module for AITER and binds nothing"
        for function in functions:
            assert function.target in CONTRACTS and CONTRACTS[function.target].sources
            assert function.call_site, f"{function.target} names no call site"
            assert function.target in called, f"no case calls {function.target}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_newest_lane_serves(case: Case) -> None:
    serve(case, NEWEST)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_older_lane_serves_or_says_why_not(case: Case) -> None:
    if not case.older:
        serve(case, OLDER)
        return
    with aiter_stand_in.installed(OLDER):
        verdict = registry.supports(case.operation, "aiter", case.arguments())
    assert not verdict.ok and case.older in verdict.reason, verdict


def serve(case: Case, lane: str) -> None:
    tolerance = contract.tolerance_of(case.operation, case.arguments())
    with aiter_stand_in.installed(lane):
        assert registry.supports(case.operation, "aiter", case.arguments()).ok
        harness.check(case.operation, "aiter", case.arguments(), tolerance=tolerance)


# Faulty calls


def record(case: Case, lane: str = NEWEST) -> list[Call]:
    """The calls of AITER that serving a case makes; none where the lane cannot."""
    calls: list[Call] = []

    def note(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        calls.append((target, args, kwargs))
        return args, kwargs

    with aiter_stand_in.installed(lane), aiter_stand_in.observed(note):
        if registry.supports(case.operation, "aiter", case.arguments()).ok:
            registry.implementation(case.operation, "aiter")(*contract.clones(case.arguments()))
    return calls


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_faulty_call_goes_unnoticed(case: Case) -> None:
    survivors = [
        str(fault) for fault in mutations(record(case), aiter_stand_in.recorded(NEWEST)) if unnoticed(case, fault)
    ]
    assert not survivors, "\n".join(survivors)


def unnoticed(case: Case, fault: Mutation) -> bool:
    index = -1

    def break_one(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal index
        index += 1
        if index != fault.call:
            return args, kwargs
        return fault.apply(args, kwargs)

    arguments = case.arguments()
    wanted = contract.results_of(case.operation, case.operation.reference, contract.clones(arguments))
    tolerance = contract.tolerance_of(case.operation, arguments)
    with aiter_stand_in.installed(), aiter_stand_in.observed(break_one):
        try:
            function = registry.implementation(case.operation, "aiter")
            with harness.poisoned():
                found = contract.results_of(case.operation, function, contract.clones(arguments))
        except (Violation, TypeError):
            return False
        except (RuntimeError, ValueError, AttributeError):
            return fault.refused  # the binding stumbles over a result of the wrong shape
        if fault.refused:
            return True
        try:
            for name, want in wanted.items():
                contract.compare(name, found[name], want, tolerance)
        except AssertionError:
            return False
    return True
