"""Measures parts of a prefill in a process of its own, and compiles for them in several."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TooLate  # the built-in one from Python 3.11 on
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from atom_patches.bench.pcp_model import SHAPES, Part
from atom_patches.kernels import suite
from atom_patches.kernels.results import CaseReport, Ceilings, Served, Timing
from atom_patches.kernels.suite import Key, Setup

if TYPE_CHECKING:
    import torch

    from atom_patches.bench.pcp_parts import Parts

NAME = "part"
"""Under which a report has its time."""

BUDGET = 0.06
"""Seconds that the replays of one part should take."""

LONG, VERY_LONG = 0.02, 0.2
"""Seconds from which a part is timed three times, and once, instead of in replays of a CUDA graph."""

MOST_SETS = 4


def key_of(index: int, part: Part) -> Key:
    """How a part is called in the suite."""
    runs = ", ".join(f"{rows} rows of {keys} keys" for rows, keys in part.pieces)
    split = f" of {part.world}" if part.world > 1 else ""
    return Key("pcp", index, part.kind, f"{part.kernels}{split}, {runs or f'{part.rows} rows'}")


def serve(parts: Sequence[Part], shape: str, pipe: Connection, setup: Setup, ceilings: Ceilings | None) -> None:
    """The worker: say what there is, then measure one part after the other."""
    suite.prepare(setup)
    import torch

    from atom_patches.bench.pcp_parts import Parts
    from atom_patches.kernels import timing

    device = torch.device(setup.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        pipe.send("torch finds no GPU here. `--device cpu --shape tiny` tries the benchmark itself.")
        return
    builder = Parts(SHAPES[shape], device)
    machine = suite.describe(setup, ceilings or timing.ceilings(device))
    pipe.send((machine, [key_of(i, part) for i, part in enumerate(parts)], {}))
    while True:
        try:
            key: Key = pipe.recv()
        except EOFError:
            return
        report = measure(builder, key, parts[key.index], device)
        pipe.send((report, not suite.usable(device)))


def measure(builder: Parts, key: Key, part: Part, device: torch.device) -> CaseReport:
    """One part's time, under `NAME`; the note says who served its operations."""
    import torch

    from atom_patches.bench.pcp_parts import Kernels

    named = (key.family, key.operation, key.label)
    kernels = Kernels(part.kernels)
    try:
        with torch.no_grad():
            call, arguments = builder.build(part, kernels)
            sets = _sets(arguments, device)
            found = _timed(call, sets, device)
    except torch.cuda.OutOfMemoryError:
        found, sets = "out of memory", []
    except Exception as error:  # whatever a kernel raises is a finding about it
        found, sets = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", []
    note = ", ".join(f"{name}: {provider}" for name, provider in kernels.served.items())
    if isinstance(found, str):
        return CaseReport(*named, note=note, problem=found)
    return CaseReport(*named, note=note, sets=len(sets), providers={NAME: Served("timed", timing=found)})


def _timed(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], device: torch.device) -> Timing | str:
    from atom_patches.kernels import timing

    if device.type == "cuda":
        # `measure` would call a long part a dozen times.
        call(*sets[0])
        once = timing.seconds(lambda: call(*sets[0]))
        if once > LONG:
            more = 0 if once > VERY_LONG else 2
            times = [once, *(timing.seconds(lambda: call(*sets[0])) for _ in range(more))]
            return Timing(statistics.median(times), min(times), max(times), len(times), f"{len(times)} calls")
    return timing.measure({NAME: call}, sets, BUDGET)[NAME]


def _sets(arguments: tuple[Any, ...], device: torch.device) -> list[tuple[Any, ...]]:
    """Enough copies of the arguments, up to a few, for the cache to hold none of them when it is used again."""
    from atom_patches.kernels import benchmark

    if device.type != "cuda":
        return [arguments]
    wanted = int(3 * benchmark.cache_bytes(device) / max(benchmark.memory(arguments), 1)) + 1
    return benchmark.repeated(arguments, min(MOST_SETS, wanted))


# Warming up


def warm(parts: Sequence[Part], shape: str, setup: Setup, workers: int, limit: float) -> Iterator[tuple[Part, str]]:
    """Let every part compile what it needs, in `workers` processes; yields each with what went wrong, or ''.

    Kinds take turns: parts of one kind often need the same kernels. What is not ready after `limit` seconds is compiled
    when it is measured.
    """
    seen: dict[tuple[str, str], int] = {}
    turn: list[tuple[int, int]] = []
    for index, part in enumerate(parts):
        number = seen[part.kind, part.kernels] = seen.get((part.kind, part.kernels), -1) + 1
        turn.append((number, index))
    end = time.monotonic() + limit
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=suite.prepare, initargs=(setup,))
    try:
        futures = [(parts[index], pool.submit(_warm, parts[index], shape, setup.device)) for _, index in sorted(turn)]
        for part, future in futures:
            try:
                yield part, future.result(timeout=max(0.0, end - time.monotonic()))
            except TooLate:
                yield part, "not ready in time"
            except BrokenProcessPool:
                yield part, "a process crashed"
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _warm(part: Part, shape: str, device_name: str) -> str:
    import torch

    from atom_patches.bench.pcp_parts import Kernels, Parts

    device = torch.device(device_name)
    try:
        with torch.no_grad():
            call, arguments = Parts(SHAPES[shape], device).build(part, Kernels(part.kernels))
            call(*arguments)
        del call, arguments
        return ""
    except Exception as error:  # the measurement tells it again
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        suite.usable(device)
