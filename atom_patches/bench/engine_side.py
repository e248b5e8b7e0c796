"""One side of `bench engine`: an engine in this process that measures what it is told, until nobody asks.

    python -m atom_patches.bench.vllm_side FD PLAN      # or sglang_side

FD is the file descriptor of a connection; each message and each answer on it is JSON. What an engine does in its own
way is a subclass's; what is measured, and between which two moments, is here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atom_patches.bench import seeded_model

CONTEXT = {"cuda": 1024, "cpu": 32}
"""Tokens that each request has when its decode steps begin to be timed."""

ROOM = 256
"""Positions for what is generated."""

WARM = 3
"""Decode steps of each request before any is timed."""

PREFILLS = 3
"""Prefills of a round; one more before them is not timed."""

NEW = 12
"""Tokens of each answer that is compared."""


def serve(make: Callable[[dict[str, Any]], Side]) -> None:
    """Start the engine, say so, and answer."""
    connection, plan = Connection(int(sys.argv[1])), json.loads(sys.argv[2])
    began = time.monotonic()
    side = make(plan)
    _send(connection, {"seconds": round(time.monotonic() - began, 1), **side.about()})
    while True:
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            return
        _send(connection, side.measure(**asked))


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(json.dumps(value).encode())


class Side(ABC):
    """An engine of the plan's size. A request, as the engine's subclass has it, is any object."""

    def __init__(self, plan: dict[str, Any]) -> None:
        size = seeded_model.SIZES[plan["size"]]
        self.size = dataclasses.replace(size, num_hidden_layers=plan["layers"] or size.num_hidden_layers)
        self.cuda = plan["device"] == "cuda"
        self.context = CONTEXT[plan["device"]]
        self.longest = max([*plan["lengths"], self.context]) + ROOM
        self.folder = seeded_model.write_config(self.size, Path(plan["folder"]), self.longest)
        self.more: dict[str, Any] = plan["options"]
        self.requests = 0

    @abstractmethod
    def model(self) -> nn.Module:
        """What runs."""

    @abstractmethod
    def fusions(self) -> list[str]:
        """What this package's decoder was built to run as one kernel; nothing in the engine's own model."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Of the engine and of torch."""

    @abstractmethod
    def graphs(self) -> str:
        """What is captured, and how prompts are cut, for people."""

    @abstractmethod
    def add(self, tokens: list[int], new: int, logprobs: bool) -> Any:
        """A request for so many tokens, which begins with the next step."""

    @abstractmethod
    def step(self) -> None:
        """One step of the engine, of which every result is on the host when it returns."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether a request is unfinished."""

    @abstractmethod
    def generated(self, request: Any) -> int:
        """Tokens that it has so far."""

    @abstractmethod
    def answer(self, request: Any) -> dict[str, list[Any]]:
        """Of a finished one that was added with `logprobs`, as ``answers.Answer`` has them."""

    @abstractmethod
    def drop(self) -> None:
        """End every request, and give back all that they had."""

    def about(self) -> dict[str, Any]:
        """Which class runs, with what, where, and on what."""
        kind = type(self.model())
        return {
            "model": f"{kind.__module__}.{kind.__name__}",
            "fusions": self.fusions(),
            "graphs": self.graphs(),
            "device": torch.cuda.get_device_name() if self.cuda else "cpu",
            "versions": self.versions(),
        }

    def measure(self, what: str, size: int, steps: int) -> Any:
        """What was asked; what it took of the device meanwhile is the other sides' again."""
        try:
            return self._measure(what, size, steps)
        finally:
            if self.cuda:
                torch.cuda.empty_cache()

    def _measure(self, what: str, size: int, steps: int) -> Any:
        """Answers, the seconds of decode steps or prefills, or the GPU time of one of them by kernel."""
        if what == "answers":
            return [self._answer(length) for length in (5, self.context // 2, size)]
        if what == "decode":
            return self._decode(size, steps)
        if what == "prefill":
            return [self.prefill(size) for _ in range(1 + PREFILLS)][1:]
        if what == "profile decode":
            return _profiled(lambda profile: self._decode(size, steps, profile), steps)
        return _profiled(lambda profile: self.prefill(size, profile), 1)

    def _add(self, length: int, new: int, logprobs: bool = False) -> Any:
        self.requests += 1
        generator = torch.Generator().manual_seed(self.requests)
        tokens = torch.randint(0, self.size.vocab_size, (length,), generator=generator).tolist()
        return self.add(tokens, new, logprobs)

    def _answer(self, length: int) -> dict[str, list[Any]]:
        request = self._add(length, NEW, logprobs=True)
        while self.busy():
            self.step()
        answer = self.answer(request)
        self.drop()
        return answer

    def _decode(self, batch: int, steps: int, profile: Any = None) -> list[float]:
        """Seconds of each step in which all requests decode."""
        requests = [self._add(self.context, ROOM) for _ in range(batch)]
        while min(map(self.generated, requests)) < WARM:
            self.step()
        spans: list[float] = []
        before = sum(map(self.generated, requests))
        _begin(profile)
        for _ in range(steps):
            began = time.perf_counter()
            self.step()
            spans.append(time.perf_counter() - began)
        _end(profile)
        if (ran := sum(map(self.generated, requests)) - before) != batch * steps:
            raise RuntimeError(
                f"{ran} tokens in {steps} steps of {batch} requests: the cache is too small for all at once"
            )
        self.drop()
        return spans

    def prefill(self, length: int, profile: Any = None) -> float:
        """Seconds to the first token."""
        self._add(length, new=1)
        _begin(profile)
        began = time.perf_counter()
        while self.busy():
            self.step()
        span = time.perf_counter() - began
        _end(profile)
        self.drop()
        return span


def _begin(profile: Any) -> None:
    if profile is not None:
        profile.start()


def _end(profile: Any) -> None:
    if profile is not None:
        torch.cuda.synchronize()
        profile.stop()


def _profiled(run: Callable[[Any], Any], steps: int) -> dict[str, Any]:
    """GPU time of a step in microseconds, and by kernel: name, time, launches."""
    run(None)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    run(profile)
    micros: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.events() or []:
        if str(event.device_type).endswith("CUDA"):
            micros[event.name] += event.device_time
            counts[event.name] += 1
    rows = [(name, us / steps, round(counts[name] / steps)) for name, us in micros.most_common(60)]
    return {"gpu_us": sum(micros.values()) / steps, "launched": sum(counts.values()) / steps, "kernels": rows}
