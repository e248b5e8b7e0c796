"""How long a call takes on a GPU, without the time that the host needs to start it.

Calls are captured into a CUDA graph that walks through several sets of inputs, so that the second-level cache does
not hold the next call's inputs, and the graph is replayed. What is to be compared is replayed in turns, so that a
change of the clock meets everyone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from atom_patches.kernels.results import Ceilings, Timing

Call = Callable[..., Any]

SHORTEST = 300e-6
"""Seconds of work in a graph: many times what starting it costs."""

ROUNDS = range(7, 51)
"""Fewest and most replays that a median is taken of."""

SLEEP = 1_000_000
"""Cycles that the device is kept busy with while the host starts what is timed: about half a millisecond."""

LONG = 0.2
"""Seconds: a call that takes longer is timed once."""


def measure(calls: Mapping[str, Call], sets: Sequence[tuple[Any, ...]], budget: float) -> dict[str, Timing | str]:
    """Time each of `calls` on every set of arguments in turn; a call that fails has the reason instead.

    Args:
        sets: arguments of one call each, all alike, each with memory of its own. Calls may write to them.
        budget: seconds that the replays of all the calls together should take.
    """
    device = _device(sets[0])
    if device.type != "cuda":
        return {name: _clocked(call, sets, budget / len(calls)) for name, call in calls.items()}
    found: dict[str, Timing | str] = {}
    ready: dict[str, _Replay] = {}
    for name, call in calls.items():
        try:
            # The first call may also compile, or load a library.
            if min(once := [seconds(lambda call=call: call(*sets[0])) for _ in range(2)]) > LONG:
                found[name] = Timing(once[1], once[1], once[1], 1, "one call")
            else:
                ready[name] = _prepare(call, sets, budget / len(calls))
        except torch.cuda.OutOfMemoryError:
            found[name] = "out of memory"
        except Exception as error:  # whatever a provider raises is a finding about it
            found[name] = f"{type(error).__name__}: {_first_line(error)}"
    if not ready:
        return found
    round_seconds = sum(seconds(replay.start) for replay in ready.values())
    rounds = max(ROUNDS.start, min(ROUNDS.stop - 1, int(budget / max(round_seconds, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, replay in ready.items():
            times[name].append(seconds(replay.start) / replay.calls)
    return found | {name: _timing(times[name], ready[name].how) for name in ready}


class _Replay(NamedTuple):
    start: Callable[[], None]
    calls: int
    how: str


def _prepare(call: Call, sets: Sequence[tuple[Any, ...]], budget: float) -> _Replay:
    """Capture `call` on every set; where that is not possible, call it from the host."""
    duration = seconds(lambda: call(*sets[0]))
    count = len(sets)
    if duration * count * ROUNDS.start > budget:
        count = max(1, int(budget / (duration * ROUNDS.start)))
    elif duration * count < SHORTEST:
        count *= min(64, -int(-SHORTEST // (duration * count)))
    order = [sets[i % len(sets)] for i in range(count)]
    if waits := _waits(call, sets[0]):
        return _Replay(functools.partial(_call_all, call, order), count, f"no CUDA graph: {waits}")
    graph = torch.cuda.CUDAGraph()
    try:
        _call_all(call, order[: len(sets)])  # what a provider derives from an argument once exists before the capture
        with torch.cuda.graph(graph):
            _call_all(call, order)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:  # whatever the driver says to a call that cannot be captured
        torch.cuda.synchronize()
        return _Replay(functools.partial(_call_all, call, order), count, f"no CUDA graph: {_first_line(error)}")
    graph.replay()
    return _Replay(graph.replay, count, "CUDA graph")


def _call_all(call: Call, order: Sequence[tuple[Any, ...]]) -> None:
    for arguments in order:
        call(*arguments)


def _waits(call: Call, arguments: tuple[Any, ...]) -> str:
    """Why `call` cannot be captured, or "": it waits for the device. A capture that fails midway would leave torch's
    allocator unusable."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*arguments)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return _first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _clocked(call: Call, sets: Sequence[tuple[Any, ...]], budget: float) -> Timing:
    """Host time, for tensors that are not on a GPU."""
    call(*sets[0])
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < ROUNDS.stop - 1 and (len(times) < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        call(*sets[len(times) % len(sets)])
        times.append(time.perf_counter() - start)
    return _timing(times, "host clock")


def _timing(times: list[float], how: str) -> Timing:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, low, high, len(times), how)


def seconds(work: Callable[[], Any]) -> float:
    """Device time from the first kernel to the last; the host gets ahead while the device sleeps."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _device(arguments: tuple[Any, ...]) -> torch.device:
    return next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))


def ceilings(device: torch.device) -> Ceilings:
    """Measure what `device` reaches: one pass over memory far larger than its cache, and a large product of random
    matrices.

    The pass is a kernel that reads and writes: a captured copy may go through the copy engines, which are slower. On a
    GPU the product is of bfloat16; zeros would let the clock rise above what real data allow.
    """
    gpu = device.type == "cuda"
    count, size, dtype = (2**30, 8192, torch.bfloat16) if gpu else (2**26, 1024, torch.float32)
    source = torch.rand(count // 4, device=device)
    target = torch.empty_like(source)
    negate = functools.partial(torch.neg, out=target)
    copy = _median(measure({"pass": negate}, [(source,)], 0.3)["pass"])
    del source, target, negate
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    product = _median(measure({"product": torch.mm}, [(a, b)], 0.5)["product"])
    how = f"pass over {count >> 20} MiB; {size}^3 product, {str(dtype).removeprefix('torch.')}"
    return Ceilings(2 * count / copy, 2 * size**3 / product, how)


def _median(found: Timing | str) -> float:
    if isinstance(found, str):
        raise RuntimeError(f"the device's ceilings cannot be measured: {found}")
    return found.seconds
