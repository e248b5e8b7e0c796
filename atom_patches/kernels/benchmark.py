"""What is measured, and how: every family's `bench.py` lists its cases in `CASES`.

A provider is timed only after its results on the very same inputs were the reference's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from atom_patches.core import settings
from atom_patches.kernels import contract, registry, timing
from atom_patches.kernels.registry import Operation
from atom_patches.kernels.results import CaseReport, Served, Timing

SETS_MEMORY = 8e9
"""Bytes that the sets of inputs of one case may take together."""

MOST_SETS = 256
BASELINE = "engine, as it calls it"
BUDGET = 0.8
"""Seconds that the replays of one case should take."""

CPU_LIMIT = (256e6, 2e10)
"""Bytes of inputs and operations of the largest case that a CPU is bothered with."""


@dataclass(frozen=True)
class Case:
    """One call of one operator, at a shape that a served model has.

    `inputs(device)` returns a tuple of the schema's arguments, in order, freshly allocated on `device`, from a
    generator with a fixed seed; on the meta device it returns the same shapes (index tensors hold no data there).
    `bytes` and `flops` are the least that any implementation has to move and to compute: every input read once, every
    output written once, in the arguments' dtypes; of a cache or a state only what the call touches.
    """

    operation: Operation
    label: str
    inputs: Callable[[torch.device], tuple[Any, ...]]
    bytes: float
    flops: float
    note: str = ""


def families() -> list[str]:
    """The families that have cases."""
    spec = importlib.util.find_spec
    return [name for name in settings.kernel_families() if spec(f"atom_patches.kernels.{name}.bench") is not None]


def cases(family: str) -> tuple[Case, ...]:
    """The cases of one family."""
    return importlib.import_module(f"atom_patches.kernels.{family}.bench").CASES


def run(case: Case, providers: Iterable[str], device: torch.device, *, budget: float = BUDGET) -> CaseReport:
    """Check and time `providers` on one case.

    What a provider raises is a finding about it, so every exception ends up in the report, except one of the
    reference: then nothing can be said about anyone.
    """
    if device.type == "cpu" and _too_large(case):
        return _report(case, problem="too large for a CPU")
    with torch.no_grad():
        try:
            arguments = case.inputs(device)
            expected = contract.results_of(case.operation, case.operation.reference, contract.clones(arguments))
        except torch.cuda.OutOfMemoryError:
            return _report(case, problem="out of memory before any provider ran")
        served = {name: _checked(case.operation, name, arguments, expected) for name in providers}
        del expected
        calls = {
            name: registry.implementation(case.operation, name) for name, one in served.items() if one.state == "timed"
        }
        if "engine" in calls and (own := registry.engine_call(case.operation)) is not None:
            calls[BASELINE] = own
        sets = _sets(case, arguments, device)
        times = timing.measure(calls, sets, budget) if calls else {}
        auto = _automatic(case.operation, arguments)
        shape_class = case.operation.shape_class(*arguments)
    baseline = times.pop(BASELINE, None)
    for name, found in times.items():
        served[name] = _timed(served[name], found)
    return _report(
        case,
        shape_class=shape_class,
        sets=len(sets),
        cached=device.type == "cuda" and len(sets) * case.bytes < cache_bytes(device),
        baseline=baseline if isinstance(baseline, Timing) else None,
        auto=auto,
        providers=served,
    )


def _too_large(case: Case) -> bool:
    most_bytes, most_flops = CPU_LIMIT
    return case.flops > most_flops or memory(case.inputs(torch.device("meta"))) > most_bytes


def _report(case: Case, **found: Any) -> CaseReport:
    own = {"label": case.label, "note": case.note, "bytes": case.bytes, "flops": case.flops}
    return CaseReport(family=case.operation.family, operation=case.operation.name, **own, **found)


def warm(case: Case, providers: Iterable[str], device: torch.device) -> str:
    """Make `providers` compile what they need for one case; returns what they raised, which the measurement will tell
    again."""
    problems: list[str] = []
    with torch.no_grad():
        arguments = case.inputs(device)
        for name in providers:
            if name == "torch":
                continue
            try:
                if registry.supports(case.operation, name, arguments).ok:
                    registry.implementation(case.operation, name)(*contract.clones(arguments))
                    torch.cuda.synchronize()
            except Exception as error:
                problems.append(f"{name}: {_told(error)}")
    return "; ".join(problems)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _checked(operation: Operation, provider: str, arguments: tuple[Any, ...], expected: contract.Expected) -> Served:
    """Whether a provider may be timed."""
    try:
        verdict = registry.supports(operation, provider, arguments)
        if not verdict.ok:
            return Served("refused", verdict.reason)
        if provider == "torch":
            return Served("timed", deviation=0.0)
        function = registry.implementation(operation, provider)
        copies = contract.clones(arguments)
        deviation = contract.check(operation, function, copies, expected)
        touched = contract.touched(operation, arguments, copies)
        return Served("wrong", f"wrote to {', '.join(touched)}") if touched else Served("timed", deviation=deviation)
    except contract.ContractError as error:
        return Served("wrong", str(error))
    except torch.cuda.OutOfMemoryError:
        return Served("error", "out of memory")
    except Exception as error:
        return Served("error", _told(error))


def _timed(served: Served, found: Timing | str) -> Served:
    if isinstance(found, str):
        return Served("error", found, served.deviation)
    return Served("timed", "", served.deviation, found)


def _automatic(operation: Operation, arguments: tuple[Any, ...]) -> str | None:
    """Whom `auto` takes, whatever the environment says."""
    for provider, _ in registry.automatic(operation, arguments):
        if registry.supports(operation, provider, arguments).ok:
            return provider
    return None


def _sets(case: Case, arguments: tuple[Any, ...], device: torch.device) -> list[tuple[Any, ...]]:
    """The arguments, and as many clones as it takes for the cache to forget the first by the time of the last."""
    if device.type != "cuda":
        return [arguments]
    wanted = int(3 * cache_bytes(device) / max(case.bytes, 1)) + 1
    count = max(1, min(wanted, MOST_SETS, int(SETS_MEMORY / max(memory(arguments), 1))))
    return repeated(arguments, count, case.operation.mutated)


def repeated(arguments: tuple[Any, ...], count: int, mutated: Collection[int] = frozenset()) -> list[tuple[Any, ...]]:
    """`count` sets of arguments alike, each with memory of its own.

    What says where things lie is shared by all: an engine, too, makes it once a step, for every layer, and a provider
    may keep what it derives from it. What is written to, by its places `mutated`, is not.
    """
    shared = [_is_index(argument) and i not in mutated for i, argument in enumerate(arguments)]
    sets = [arguments]
    for _ in range(count - 1):
        own = contract.clones(tuple(None if kept else arg for arg, kept in zip(arguments, shared, strict=True)))
        sets.append(tuple(arg if kept else new for arg, new, kept in zip(arguments, own, shared, strict=True)))
    return sets


def _is_index(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and not argument.dtype.is_floating_point and argument.nbytes < 2**20


def memory(arguments: tuple[Any, ...]) -> int:
    """Bytes of the buffers that the arguments lie in."""
    buffers: dict[int, int] = {}
    for argument in arguments:
        for tensor in argument if isinstance(argument, (list, tuple)) else [argument]:
            if isinstance(tensor, torch.Tensor):
                buffer = tensor.untyped_storage()
                buffers[buffer._cdata] = buffer.nbytes()
    return sum(buffers.values())


def cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size
