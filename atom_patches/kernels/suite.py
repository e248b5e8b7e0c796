"""Run the cases in a process of their own, which a kernel may crash, hang or poison: then the next case gets a new one.

Nothing heavy is imported here until a worker starts.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TooLate  # the built-in one from Python 3.11 on
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from atom_patches.kernels.results import CaseReport, Ceilings, Machine

START_LIMIT = 300.0
CASE_LIMIT = 150.0
WARM_LIMIT = 150.0
"""Seconds after which a starting worker, a case, and the warming-up as a whole are given up."""


class SuiteError(RuntimeError):
    """The benchmark cannot run here; the message says why and what to do."""


class NoDevice(SuiteError):
    """There is no GPU."""


class Key(NamedTuple):
    """A case, by its place in its family's `CASES`."""

    family: str
    index: int
    operation: str
    label: str


@dataclass(frozen=True)
class Setup:
    """What every worker needs to know. `engine` is the engine whose kernels are the baseline, or None."""

    device: str
    engine: str | None
    providers: tuple[str, ...]


Serve = Callable[[Connection, Setup, "Ceilings | None"], None]


class Suite:
    """A worker process, replaced when it is lost."""

    def __init__(self, setup: Setup, serve: Serve | None = None) -> None:
        """Start a worker, which runs `serve`, and measure the device.

        Raises:
            NoDevice: the setup asks for a GPU, and there is none.
            SuiteError: the worker does not start.
        """
        self._start = functools.partial(_Worker, setup, serve or _serve)
        self._worker = self._start(None)
        self.machine: Machine = self._worker.machine
        self.cases: list[Key] = self._worker.cases
        self.broken: dict[str, str] = self._worker.broken

    def run(self, keys: Sequence[Key]) -> Iterator[CaseReport]:
        """Measure the cases, in order."""
        for key in keys:
            if not self._worker.alive:
                self._worker = self._start(self.machine.ceilings)
            try:
                report, poisoned = self._worker.ask(key, CASE_LIMIT)
            except _Lost as lost:
                report, poisoned = CaseReport(key.family, key.operation, key.label, problem=str(lost)), False
            if poisoned:
                self._worker.stop()
            yield report

    def close(self) -> None:
        """End the worker."""
        self._worker.stop()


class _Lost(Exception):
    """The worker is gone."""


class _Worker:
    def __init__(self, setup: Setup, serve: Serve, ceilings: Ceilings | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, setup, ceilings), daemon=True)
        self._process.start()
        theirs.close()
        try:
            hello = self._receive(START_LIMIT, "starting")
        except _Lost as lost:
            raise SuiteError(f"the benchmark's process did not start: {lost}") from lost
        if isinstance(hello, str):
            self.stop()
            raise NoDevice(hello)
        self.machine, self.cases, self.broken = hello

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, key: Key, limit: float) -> tuple[CaseReport, bool]:
        self._pipe.send(key)
        return self._receive(limit, f"{key.operation} {key.label}")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _receive(self, limit: float, doing: str) -> Any:
        try:
            if self._pipe.poll(limit):
                return self._pipe.recv()
            reason = f"gave up after {limit:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            reason = f"the process ended with status {self._process.exitcode} ({doing})"
        self.stop()
        raise _Lost(reason)


def _serve(pipe: Connection, setup: Setup, ceilings: Ceilings | None) -> None:
    """The worker: say what there is, then answer one case after the other."""
    prepare(setup)
    import torch

    from atom_patches.kernels import benchmark, timing

    device = torch.device(setup.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        pipe.send("torch finds no GPU here. `--device cpu` times the references, to try the benchmark itself.")
        return
    keys, broken = _keys()
    if ceilings is None:
        ceilings = timing.ceilings(device)
    pipe.send((describe(setup, ceilings), keys, broken))
    while True:
        try:
            key = pipe.recv()
        except EOFError:
            return
        case = benchmark.cases(key.family)[key.index]
        try:
            report = benchmark.run(case, setup.providers, device)
        except Exception as error:
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            report = CaseReport(key.family, key.operation, key.label, problem=problem)
        pipe.send((report, not usable(device)))


def usable(device: Any) -> bool:
    """Free what the case has left behind; false when the device answers nothing any more."""
    import gc

    import torch

    gc.collect()
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def prepare(setup: Setup) -> None:
    """Name the engine; leave it to the parent to be interrupted from the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from atom_patches.kernels import registry

    if setup.engine is not None:
        registry.offer_engine(f"atom_patches.{setup.engine}.kernels")


def _keys() -> tuple[list[Key], dict[str, str]]:
    """Every case, and the families whose cases cannot be imported, with the reason."""
    from atom_patches.kernels import benchmark

    keys: list[Key] = []
    broken: dict[str, str] = {}
    for family in benchmark.families():
        try:
            found = benchmark.cases(family)
        except Exception as error:
            broken[family] = f"{type(error).__name__}: {error}"
            continue
        keys += [Key(family, i, case.operation.name, case.label) for i, case in enumerate(found)]
    return keys, broken


def describe(setup: Setup, ceilings: Ceilings) -> Machine:
    """The device, and the versions of what computes on it."""
    import importlib.metadata
    import platform

    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", setup.engine or ""):
        try:
            versions[name] = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
    gpu = setup.device.startswith("cuda")
    device = torch.cuda.get_device_name(setup.device) if gpu else platform.processor() or platform.machine()
    return Machine(device, "cuda" if gpu else "cpu", setup.engine, versions, ceilings)


# Warming up


def warm(setup: Setup, keys: Sequence[Key], workers: int) -> Iterator[tuple[Key, str]]:
    """Let every case compile what it needs, in `workers` processes; yields each case with what went wrong, or ''.

    Cases of different families come first: cases of one family often need the same kernels, which are compiled once
    if one case is ahead.
    """
    turns = sorted(range(len(keys)), key=lambda i: (keys[i].index, i))
    end = time.monotonic() + WARM_LIMIT
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=prepare, initargs=(setup,))
    try:
        futures = [(keys[i], pool.submit(_warm, setup, keys[i])) for i in turns]
        for key, future in futures:
            try:
                yield key, future.result(timeout=max(0.0, end - time.monotonic()))
            except TooLate:
                yield key, "not ready in time"
            except BrokenProcessPool:
                yield key, "a process crashed"
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _warm(setup: Setup, key: Key) -> str:
    import torch

    from atom_patches.kernels import benchmark

    device = torch.device(setup.device)
    try:
        return benchmark.warm(benchmark.cases(key.family)[key.index], setup.providers, device)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        usable(device)
