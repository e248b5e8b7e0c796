"""The AITER bindings against a stand-in made from AITER's recorded signatures and documented call sites."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import aiter_signatures
import aiter_stand_in
import harness
import pytest
import torch
from aiter_stand_in.cases import CASES, Case
from aiter_stand_in.checks import CONTRACTS, Violation
from aiter_stand_in.mutations import Call, Mutation, mutations, scattered

from atom_patches.kernels import aiter_binding, contract, registry
from atom_patches.kernels.aiter_binding import Function, Symbol, compare, signatures

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


def test_the_documented_table_is_what_is_bound() -> None:
    """tools/aiter_signatures.py writes it."""
    assert aiter_signatures.table() in aiter_signatures.DOCUMENT.read_text(encoding="utf-8")


def test_every_bound_function_has_a_contract_a_call_site_and_a_case() -> None:
    called = {call[0] for lane in aiter_stand_in.LANES for case in CASES for call in record(case, lane)}
    for family, functions in aiter_signatures.bound_functions().items():
        assert functions, f"{family} has a module for AITER and binds nothing"
        text = importlib.import_module(f"atom_patches.kernels.{family}.aiter_impl").__doc__ or ""
        for function in functions:
            assert function.target in CONTRACTS and CONTRACTS[function.target].sources
            path = function.call_site.partition(": ")[0].rpartition(" ")[2]
            assert path.endswith((".py", ".cu")) and path in text, f"{function.target}: {path!r} is no call site"
            assert function.target in called, f"no case calls {function.target}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_newest_lane_serves(case: Case) -> None:
    serve(case, NEWEST)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_older_lane_serves_or_says_why_not(case: Case) -> None:
    if not case.older:
        serve(case, OLDER)
        return
    with aiter_stand_in.installed(OLDER), case.prepared():
        verdict = registry.supports(case.operation, "aiter", case.arguments())
    assert not verdict.ok and case.older in verdict.reason, verdict


def serve(case: Case, lane: str) -> None:
    tolerance = contract.tolerance_of(case.operation, case.arguments())
    with aiter_stand_in.installed(lane), case.prepared():
        assert registry.supports(case.operation, "aiter", case.arguments()).ok
        harness.check(case.operation, "aiter", case.arguments(), tolerance=tolerance)


# Faulty calls


def record(case: Case, lane: str = NEWEST) -> list[Call]:
    """The calls of AITER that serving a case makes; none where the lane cannot."""
    calls: list[Call] = []

    def note(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        calls.append((target, args, kwargs))
        return args, kwargs

    with aiter_stand_in.installed(lane), aiter_stand_in.observed(note), case.prepared():
        if registry.supports(case.operation, "aiter", case.arguments()).ok:
            registry.implementation(case.operation, "aiter")(*contract.clones(case.arguments()))
    return calls


LANES = [
    pytest.param(case, lane, id=f"{case}-{lane}")
    for case in CASES
    for lane in aiter_stand_in.LANES
    if lane == NEWEST or not case.older
]


@pytest.mark.parametrize(("case", "lane"), LANES)
def test_no_faulty_call_goes_unnoticed(case: Case, lane: str) -> None:
    faults = mutations(record(case, lane), aiter_stand_in.recorded(lane))
    survivors = [str(fault) for fault in faults if unnoticed(case, lane, fault)]
    assert not survivors, "\n".join(survivors)


@pytest.mark.parametrize(("case", "lane"), LANES)
def test_no_stride_goes_unnoticed(case: Case, lane: str) -> None:
    """Values that are not neighbours in memory are refused, or read for what they are."""
    survivors: list[str] = []
    for fault in scattered(record(case, lane), aiter_stand_in.recorded(lane)):
        found = outcome(case, lane, fault)
        if found == "wrong":
            survivors.append(str(fault))
    assert not survivors, "\n".join(survivors)


def test_most_arguments_must_be_dense() -> None:
    """The test above would be content with contracts that take any strides."""
    refused: dict[str, int] = {}
    for case in CASES:
        for fault in scattered(record(case, NEWEST), aiter_stand_in.recorded(NEWEST)):
            refused[fault.target] = refused.get(fault.target, 0) + (outcome(case, NEWEST, fault) == "refused")
    assert set(refused) <= set(CONTRACTS) and all(refused.values()), refused


def unnoticed(case: Case, lane: str, fault: Mutation) -> bool:
    found = outcome(case, lane, fault)
    return found not in (("refused",) if fault.refused else ("refused", "stumbled", "wrong"))


def outcome(case: Case, lane: str, fault: Mutation) -> str:
    """What serving a case with one faulty call comes to: "refused" by the stand-in, "stumbled" in the binding over what
    it got back, a "wrong" result, or a "right" one."""
    index = -1

    def break_one(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal index
        index += 1
        return fault.apply(args, kwargs) if index == fault.call else (args, kwargs)

    arguments = case.arguments()
    wanted = contract.results_of(case.operation, case.operation.reference, contract.clones(arguments))
    tolerance = contract.tolerance_of(case.operation, arguments)
    with aiter_stand_in.installed(lane), aiter_stand_in.observed(break_one), case.prepared():
        try:
            function = registry.implementation(case.operation, "aiter")
            with harness.poisoned():
                found = contract.results_of(case.operation, function, contract.clones(arguments))
        except (Violation, TypeError):
            return "refused"
        except (RuntimeError, ValueError, AttributeError, IndexError):
            return "stumbled"
        try:
            for name, want in wanted.items():
                contract.compare(name, found[name], want, tolerance)
        except AssertionError:
            return "wrong"
    return "right"


# Other signatures

BOUND = [
    pytest.param(function, id=f"{family}-{function.target.partition(':')[2]}-{i}")
    for family, functions in aiter_signatures.bound_functions().items()
    for i, function in enumerate(functions)
]


@pytest.mark.parametrize("function", BOUND)
def test_a_drifted_signature_is_a_reason_not_an_error(function: Function) -> None:
    """Whatever happens to the parameters that are passed, the verdict says no; other optional ones may come and go."""
    signature = next(s for s in (aiter_stand_in.recorded(lane).get(function.target) for lane in (NEWEST, OLDER)) if s)
    for what, drifted, harmless in drifts(function, signature):
        with aiter_stand_in.installed(changed={function.target: drifted}):
            verdict = function.verdict()
        assert verdict.ok == harmless, f"{what}: {verdict}"
        assert harmless or verdict.reason


def drifts(function: Function, signature: inspect.Signature) -> Iterator[tuple[str, inspect.Signature | None, bool]]:
    """(what happened, the new signature, whether the call still means the same)"""
    parameters = list(signature.parameters.values())
    yield "nothing", signature, True
    yield "the function is gone", None, False
    later = inspect.Parameter("later", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = len(function.positional)
    for i in range(known + 1):
        moved = [
            *parameters[:i],
            later.replace(default=None if i == known else inspect.Parameter.empty),
            *parameters[i:],
        ]
        yield f"a parameter more at {i}", signature.replace(parameters=_ordered(moved)), i == known
    for i, parameter in enumerate(parameters):
        passed = i < known or parameter.name in function.keywords
        without = parameters[:i] + parameters[i + 1 :]
        yield f"no {parameter.name}", signature.replace(parameters=without), not passed
        if i + 1 < known:
            swapped = [*parameters[:i], parameters[i + 1], parameter, *parameters[i + 2 :]]
            yield f"{parameter.name} later", signature.replace(parameters=_ordered(swapped)), False
    keyword_only = inspect.Parameter("needed", inspect.Parameter.KEYWORD_ONLY)
    yield "one more is needed", signature.replace(parameters=[*parameters, keyword_only]), False


def _ordered(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Defaults wherever Python demands them: behind the first default."""
    seen = False
    result: list[inspect.Parameter] = []
    for p in parameters:
        seen = seen or (p.default is not p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
        bare = seen and p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        result.append(p.replace(default=None) if bare else p)
    return result


def test_signatures_are_read_without_running_anything() -> None:
    source = """
import nothing_like_this

@decorated(with_something)
def f(a: Tensor, b: "str | None" = None, *rest, c: int = 1 << 4, d=-1, e=Kind.No, **more) -> None: ...

def f(a, /, b=(16, 16)): ...
"""
    (found,) = signatures(source).values()
    assert str(found) == "(a, b=(16, 16))"
    first = signatures(source.rpartition("def f")[0])["f"]
    assert first.parameters["e"].default == Symbol("Kind.No") and first.parameters["c"].default == Symbol("1 << 4")
    assert first.parameters["d"].default == -1
    assert not compare(Function("m:f", ("a", "rest")), first).ok


def test_a_module_that_cannot_be_imported_is_a_reason() -> None:
    function = Function("json.no_such_module:dumps", ("obj",))
    assert "no module json.no_such_module" in function.verdict().reason
    assert "no json:no_such_function" in Function("json:no_such_function", ()).verdict().reason


def test_a_call_that_was_not_declared_is_refused() -> None:
    with pytest.raises(TypeError, match="is bound as"):
        Function("json:dumps", ("obj",))([], indent=1)


# What is refused, and what AITER would do otherwise


def refused(
    operation: str, changed: dict[int, Any], reason: str, label: str = "", architecture: str = "gfx950"
) -> None:
    case = next(c for c in CASES if c.operation.name == operation and label in c.label)
    arguments = list(case.arguments())
    for position, value in changed.items():
        arguments[position] = value(arguments[position]) if callable(value) else value
    with aiter_stand_in.installed(architecture=architecture), case.prepared():
        verdict = registry.supports(case.operation, "aiter", tuple(arguments))
    assert not verdict.ok and reason in verdict.reason, verdict


@pytest.mark.parametrize(
    ("operation", "changed", "reason"),
    [
        ("rms_norm", {1: torch.Tensor.float}, "weight of the input's dtype"),
        ("rms_norm", {0: torch.Tensor.float}, "float16 and bfloat16 only"),
        ("add_rms_norm", {2: torch.Tensor.float}, "one dtype for all"),
        ("causal_conv1d", {1: lambda w: w.repeat(1, 2)}, "2, 3 or 4 taps, not 8"),
        ("causal_conv1d_update", {3: torch.Tensor.float}, "one dtype of 16 or 32 bits"),
        ("qk_norm_rope_cache", {14: False}, "1 + weight"),
        ("qk_norm_rope_cache", {1: lambda p: p.repeat(3, 1)}, "one row of positions"),
        ("qk_norm_rope_cache", {5: lambda c: c.to(torch.float8_e4m3fn)}, "does not limit values"),
        ("paged_attention", {1: lambda c: c[:, :8], 2: lambda c: c[:, :8]}, "pages of 1, 16, 1024 tokens, not 8"),
        ("paged_attention", {14: torch.zeros(9)}, "positions cannot be given"),
        ("paged_attention", {1: lambda c: c.mT.contiguous().mT}, "not dense"),
        ("mla_attention", {5: 2}, "bound for decode"),
        ("mla_attention", {0: lambda q: q[:, :8]}, "16 and 128 heads, not 8"),
        ("sparse_mla_attention", {1: lambda c: c[::2]}, "contiguous"),
        ("indexer_cache_write", {3: False}, "reciprocal"),
        ("indexer_logits_paged", {1: lambda c: c.view(1, 5, 132)}, "pages of one token, not 5"),
        ("moe_routing", {2: "sigmoid"}, "does not say in which order"),
        ("fused_moe", {5: torch.arange(3)}, "in which order a rank holds them"),
        ("fused_moe", {1: lambda w: w[:, :24], 2: lambda w: w[:, :, :12]}, "tiles of 16 x 32"),
        ("chunk_gated_delta_rule", {0: lambda q: q[..., :32]}, "64 or 128 values, not 32"),
        ("gdn_decode", {11: 1e-5}, "epsilon of 1e-06"),
        ("gdn_decode", {6: lambda s: s.mT}, "dense"),
    ],
)
def test_refusals(operation: str, changed: dict[int, Any], reason: str) -> None:
    refused(operation, changed, reason)


@pytest.mark.parametrize("operation", [o for o in ("indexer_cache_write", "indexer_cache_gather", "indexer_logits")])
def test_where_fp8_is_another_the_indexer_is_refused(operation: str) -> None:
    refused(operation, {}, "is not OCP E4M3", architecture="gfx942")


def test_experts_are_refused_until_copies_are_allowed() -> None:
    case = next(c for c in CASES if c.operation.name == "fused_moe")
    with aiter_stand_in.installed():
        assert "keep_copies" in registry.supports(case.operation, "aiter", case.arguments()).reason


def test_experts_that_were_written_to_are_copied_again() -> None:
    case = next(c for c in CASES if c.operation.name == "fused_moe")
    arguments = case.arguments()
    with aiter_stand_in.installed(), case.prepared():
        run = registry.implementation(case.operation, "aiter")
        first = run(*arguments)
        assert torch.equal(run(*arguments), first)
        arguments[2].mul_(2)
        torch.testing.assert_close(run(*arguments), first * 2, rtol=2e-2, atol=2e-2)


def test_a_refilled_buffer_of_sequence_starts_is_read_again() -> None:
    case = next(c for c in CASES if c.operation.name == "chunk_gated_delta_rule")
    arguments = case.arguments()
    with aiter_stand_in.installed():
        run = registry.implementation(case.operation, "aiter")
        run(*arguments)
        arguments[5].copy_(torch.tensor([0, 2, 2, 3, 7]))
        wanted = case.operation.reference(*arguments)
        torch.testing.assert_close(run(*arguments), wanted, rtol=2e-2, atol=2e-2)
