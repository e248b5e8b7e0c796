"""The benchmark: what it checks before it times, what it times, and what a lost process costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import benchmark_worker as worker
import pytest
import torch
from torch import Tensor

from atom_patches.kernels import benchmark, registry, suite, timing
from atom_patches.kernels.benchmark import Case
from atom_patches.kernels.registry import YES, Operation, no
from atom_patches.kernels.results import CaseReport, Timing
from atom_patches.kernels.suite import Key, Setup, Suite

CPU = torch.device("cpu")


def shift(x: Tensor, total: Tensor, by: float) -> Tensor:
    """Shifts x and adds what it was to total."""
    total += x
    return x + by


PROBE = Operation(
    package=f"{__name__}.probe",
    name="benchmark_probe",
    schema="(Tensor x, Tensor(a!) total, float by) -> Tensor",
    reference=shift,
    fake=lambda x, total, by: torch.empty_like(x),
    shape_class=lambda x, total, by: f"n{x.numel()}",
    tolerance={"float32": (1e-6, 1e-6)},
)


def inputs(device: torch.device) -> tuple[Any, ...]:
    return torch.arange(8.0, device=device), torch.zeros(8, device=device), 2.0


CASE = Case(PROBE, "8 values", inputs, bytes=96, flops=16, note="a note")


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let providers compute the probe, or refuse it with a text."""

    def provide(**functions: Callable[..., Tensor] | str) -> None:
        functions["torch"] = shift
        refused = {name: one for name, one in functions.items() if isinstance(one, str)}
        monkeypatch.setattr(registry, "supports", lambda op, name, args: no(refused[name]) if name in refused else YES)
        monkeypatch.setattr(registry, "implementation", lambda op, name: functions[name])
        monkeypatch.setattr(registry, "engine_call", lambda op: functions.get("own"))

    return provide


def run(*providers: str) -> CaseReport:
    return benchmark.run(CASE, providers, CPU, budget=0.01)


class TestCheck:
    def test_who_agrees_is_timed(self, provide: Any) -> None:
        provide(triton=shift)
        report = run("triton", "torch")
        assert report.problem == ""
        assert {name: one.state for name, one in report.providers.items()} == {"triton": "timed", "torch": "timed"}
        assert report.seconds("triton")
        assert (report.shape_class, report.auto, report.note) == ("n8", "torch", "a note")

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            (lambda x, total, by: (total.add_(x), x + by + 0.1)[1], "output 0"),
            (lambda x, total, by: x + by, "written argument 1"),
            (lambda x, total, by: (total.add_(x), x.add_(by))[1], "argument 0"),
        ],
    )
    def test_who_is_wrong_gets_no_time(self, provide: Any, wrong: Any, reason: str) -> None:
        provide(triton=wrong)
        served = run("triton", "torch").providers["triton"]
        assert served.state == "wrong"
        assert reason in served.reason
        assert served.timing is None

    def test_what_is_unspecified_may_be_anything(self, provide: Any) -> None:
        def negative(x: Tensor, total: Tensor, by: float) -> Tensor:
            return torch.where(x < 4, torch.nan, shift(x, total, by))

        provide(triton=negative)
        assert run("triton").providers["triton"].state == "wrong"
        try:
            object.__setattr__(PROBE, "unspecified", lambda x, total, by: x < 4)
            assert run("triton").providers["triton"].state == "timed"
            object.__setattr__(PROBE, "unspecified", lambda x, total, by: x < 3)
            assert run("triton").providers["triton"].state == "wrong"
        finally:
            object.__setattr__(PROBE, "unspecified", None)

    def test_a_wrong_provider_does_not_spoil_the_inputs_of_the_next(self, provide: Any) -> None:
        provide(engine=lambda x, total, by: x.mul_(0), triton=shift)
        report = run("engine", "triton")
        assert [one.state for one in report.providers.values()] == ["wrong", "timed"]

    def test_refusals_and_failures_are_told_apart(self, provide: Any) -> None:
        def fail(x: Tensor, total: Tensor, by: float) -> Tensor:
            raise IndexError("out of range\nand more")

        provide(engine="no float32", triton=fail)
        report = run("engine", "triton", "torch")
        assert (report.providers["engine"].state, report.providers["engine"].reason) == ("refused", "no float32")
        assert (report.providers["triton"].state, report.providers["triton"].reason) == (
            "error",
            "IndexError: out of range",
        )
        assert report.seconds("torch")

    def test_the_engines_own_call_is_the_baseline(self, provide: Any) -> None:
        def slow(x: Tensor, total: Tensor, by: float) -> Tensor:
            time.sleep(0.01)
            return shift(x, total, by)

        provide(engine=shift, own=slow)
        report = run("engine")
        assert report.baseline is not None and report.baseline.seconds > 0.009
        assert list(report.providers) == ["engine"]
        assert report.ratio("engine") == report.baseline.seconds / (report.seconds("engine") or 0)

    def test_warming_up_tries_everyone_and_tells_who_failed(
        self, provide: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served: list[str] = []

        def fail(x: Tensor, total: Tensor, by: float) -> Tensor:
            raise IndexError("out of range")

        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        provide(engine=fail, aiter="no", triton=lambda *args: served.append("triton"))
        assert benchmark.warm(CASE, ["engine", "aiter", "triton", "torch"], CPU) == "engine: IndexError: out of range"
        assert served == ["triton"]

    def test_what_is_too_large_for_a_cpu_is_not_tried(self, provide: Any) -> None:
        def large(device: torch.device) -> tuple[Any, ...]:
            assert device.type == "meta"
            return torch.empty(2**40, device=device), torch.empty(1, device=device), 1.0

        assert benchmark.run(Case(PROBE, "", large, 1, 1), ["torch"], CPU).problem == "too large for a CPU"


class TestSets:
    """The sets of inputs, as for a GPU with a cache of 1000 bytes."""

    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(benchmark, "cache_bytes", lambda device: 1000)

    def sets(self, arguments: tuple[Any, ...], moved: float) -> list[tuple[Any, ...]]:
        return benchmark._sets(Case(PROBE, "", inputs, moved, 1), arguments, torch.device("cuda"))

    def test_together_they_exceed_the_cache_three_times(self) -> None:
        sets = self.sets(inputs(CPU), 96)
        assert len(sets) * 96 > 3000 >= (len(sets) - 1) * 96
        assert len({one[0].data_ptr() for one in sets}) == len({one[1].data_ptr() for one in sets}) == len(sets)

    def test_memory_and_count_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert len(self.sets(inputs(CPU), 0.001)) == benchmark.MOST_SETS
        monkeypatch.setattr(benchmark, "SETS_MEMORY", 200)
        assert len(self.sets(inputs(CPU), 96)) == 3
        monkeypatch.setattr(benchmark, "SETS_MEMORY", 10)
        assert len(self.sets(inputs(CPU), 96)) == 1

    def test_indices_are_shared_unless_they_are_written_to(self) -> None:
        first, second, *_ = self.sets((torch.arange(4), torch.arange(4), 1.0), 96)
        assert first[0] is second[0]
        assert first[1] is not second[1]


class FakeGpu:
    """torch.cuda with a clock that only calls advance: seconds of work, and what a host would add."""

    def __init__(self) -> None:
        self.now = 0.0
        self.capturing: list[Callable[[], Any]] | None = None
        self.captures = 0
        self.forbidden = False
        self.OutOfMemoryError = torch.cuda.OutOfMemoryError

    def call(self, seconds: float, waits: bool = False, fails: Exception | None = None) -> Callable[..., None]:
        def work() -> None:
            self.now += seconds

        def call(*arguments: Any) -> None:
            if waits and self.forbidden:
                raise RuntimeError("called a synchronizing CUDA operation")
            if self.capturing is None:
                work()
            elif fails is not None:
                raise fails
            else:
                self.capturing.append(work)

        return call

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def CUDAGraph(self) -> Any:
        graph = SimpleNamespace(works=[])
        graph.replay = lambda: [work() for work in graph.works]
        return graph

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.capturing, self.captures = graph.works, self.captures + 1
        try:
            yield
        finally:
            self.capturing = None

    def set_sync_debug_mode(self, mode: str) -> None:
        self.forbidden = mode == "error"

    def _sleep(self, cycles: int) -> None:
        self.now += 1e-3

    def synchronize(self) -> None:
        pass


class TestTiming:
    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
        gpu = FakeGpu()
        monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=gpu, Tensor=Tensor))
        monkeypatch.setattr(timing, "_device", lambda arguments: torch.device("cuda"))
        return gpu

    def test_one_call_is_a_replay_over_its_calls(self, gpu: FakeGpu) -> None:
        found = timing.measure({"a": gpu.call(2e-6), "b": gpu.call(1e-5)}, [(0,), (1,), (2,)], 0.1)
        a, b = found["a"], found["b"]
        assert isinstance(a, Timing) and isinstance(b, Timing)
        assert (a.how, b.how) == ("CUDA graph", "CUDA graph")
        assert a.seconds == pytest.approx(2e-6)
        assert b.seconds == pytest.approx(1e-5)
        assert a.rounds == b.rounds in timing.ROUNDS

    def test_a_graph_is_long_enough_and_visits_every_set(self, gpu: FakeGpu) -> None:
        visited: list[int] = []
        work = gpu.call(1e-6)

        def call(number: int) -> None:
            if gpu.capturing is not None:
                visited.append(number)
            work()

        timing.measure({"a": call}, [(i,) for i in range(7)], 0.1)
        assert len(visited) * 1e-6 >= timing.SHORTEST
        assert visited[:8] == [0, 1, 2, 3, 4, 5, 6, 0]

    def test_a_call_that_waits_is_not_captured(self, gpu: FakeGpu) -> None:
        found = timing.measure({"a": gpu.call(1e-4, waits=True)}, [(0,)], 0.1)["a"]
        assert isinstance(found, Timing)
        assert gpu.captures == 0
        assert found.how == "no CUDA graph: called a synchronizing CUDA operation"
        assert found.seconds == pytest.approx(1e-4)

    def test_a_capture_that_fails_leaves_the_host(self, gpu: FakeGpu) -> None:
        calls = {"a": gpu.call(1e-4, fails=RuntimeError("not permitted\nmore")), "b": gpu.call(1e-4)}
        found = timing.measure(calls, [(0,)], 0.1)
        assert [one.how for one in found.values() if isinstance(one, Timing)] == [
            "no CUDA graph: not permitted",
            "CUDA graph",
        ]

    def test_who_fails_costs_the_others_nothing(self, gpu: FakeGpu) -> None:
        calls = {"a": gpu.call(1e-4, fails=torch.cuda.OutOfMemoryError("x")), "b": gpu.call(1e-4, fails=KeyError("k"))}
        found = timing.measure(calls | {"c": gpu.call(1e-4)}, [(0,)], 0.1)
        assert (found["a"], found["b"]) == ("out of memory", "KeyError: 'k'")
        assert isinstance(found["c"], Timing)

    def test_a_long_call_is_timed_once(self, gpu: FakeGpu) -> None:
        calls: list[int] = []
        work = gpu.call(3.0)
        found = timing.measure({"a": lambda i: (calls.append(i), work())}, [(0,), (1,)], 0.1)["a"]
        assert calls == [0, 0]
        assert found == Timing(3.0, 3.0, 3.0, 1, "one call")

    def test_a_first_call_that_compiles_does_not_count(self, gpu: FakeGpu) -> None:
        pending = [5.0]

        def call(number: int) -> None:
            gpu.now += pending.pop() if pending else 0.0
            work(number)

        work = gpu.call(1e-4)
        found = timing.measure({"a": call}, [(0,)], 0.1)["a"]
        assert isinstance(found, Timing)
        assert found.seconds == pytest.approx(1e-4)

    def test_the_budget_bounds_the_replays(self, gpu: FakeGpu) -> None:
        begin = gpu.now
        timing.measure({"a": gpu.call(0.02)}, [(i,) for i in range(50)], 0.3)
        assert gpu.now - begin < 1.0


class TestSuite:
    def test_only_the_case_that_loses_the_process_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suite, "CASE_LIMIT", 1.0)
        running = Suite(Setup("cpu", None, ("torch",)), worker.serve)
        try:
            fine, crash, hang, poison, last = running.run(running.cases)
        finally:
            running.close()
        assert crash.problem == "the process ended with status 7 (op crash)"
        assert hang.problem == "gave up after 1 s"
        assert not (fine.problem or poison.problem or last.problem)
        # A poisoned worker is replaced, and its successor need not measure the ceilings again.
        assert fine.shape_class.endswith(" None")
        assert last.shape_class.endswith(f" {worker.MACHINE.ceilings}")
        assert poison.shape_class.split()[0] != last.shape_class.split()[0]

    def test_no_device_is_told(self) -> None:
        with pytest.raises(suite.NoDevice, match="no such device"):
            Suite(Setup("none", None, ()), worker.serve)

    def test_a_worker_that_does_not_start_is_told(self) -> None:
        with pytest.raises(suite.SuiteError, match="did not start: the process ended with status 3"):
            Suite(Setup("broken", None, ()), worker.serve)

    def test_warming_up_takes_every_case_the_first_of_each_family_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = [Key("a", 0, "x", ""), Key("a", 1, "x", ""), Key("b", 0, "y", "")]
        found = list(suite.warm(Setup("meta", None, ()), keys, 1))
        assert [(key.family, key.index) for key, _ in found] == [("a", 0), ("b", 0), ("a", 1)]
        assert all(problem.startswith("ModuleNotFoundError") for _, problem in found)


@pytest.mark.parametrize("family", benchmark.families())
def test_every_case_is_one_call_with_a_name_of_its_own(family: str) -> None:
    cases = benchmark.cases(family)
    names = [(case.operation.name, case.label) for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        assert case.operation.family == family
        arguments = case.inputs(torch.device("meta"))
        assert all(argument.is_meta for argument in arguments if isinstance(argument, Tensor))
        case.operation.fake(*arguments)
        assert isinstance(case.operation.shape_class(*arguments), str)
        assert case.bytes > 0 and case.flops >= 0


@pytest.mark.parametrize("family", benchmark.families())
def test_references_that_read_the_device_say_so(family: str) -> None:
    """A CUDA graph cannot capture them; on the meta device, which has no data, they fail."""
    for case in benchmark.cases(family):
        arguments = case.inputs(torch.device("meta"))
        try:
            case.operation.reference(*arguments)
        except NotImplementedError:
            assert case.operation.reference_reads, f"{case.operation.name} {case.label}"
