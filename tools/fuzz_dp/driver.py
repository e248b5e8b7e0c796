"""Start one process a rank, send all of them the same step, and compare what they entered."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compare import Divergence, divergence
from .schedule import Step

if TYPE_CHECKING:
    from .recorder import Entry

START_DEADLINE = 240.0
GRACE = 1.0  # for the other ranks' answers once one has failed


@dataclass
class Finding:
    """Ranks that parted, or a rank that failed.

    Attributes:
        step: which one; -1: while starting.
        actions: what each rank was to run.
        parted: where two ranks' sequences part; None: they do not.
        failures: tracebacks of ranks that raised, by rank.
        waiting: stacks of the ranks that did not finish, by rank.
        sequences: all that each rank entered in the step.
    """

    step: int
    actions: Step
    parted: Divergence | None = None
    failures: dict[int, str] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    sequences: dict[int, list[Entry]] = field(default_factory=dict)

    def headline(self) -> str:
        """One line, for summaries: what broke."""
        if self.parted is not None:
            return str(self.parted).splitlines()[0]
        if self.failures:
            rank, trace = next(iter(self.failures.items()))
            return f"rank {rank} raised {trace.strip().splitlines()[-1]}"
        return f"ranks {sorted(self.waiting)} never finished"

    def __str__(self) -> str:
        lines = [f"step {self.step}: " + ", ".join(f"rank {i} {action}" for i, action in enumerate(self.actions))]
        if self.parted is not None:
            lines.append(str(self.parted))
        for rank, trace in sorted(self.failures.items()):
            lines.append(f"rank {rank} raised:\n{_indented(trace)}")
        shown = self.parted.ranks if self.parted is not None else sorted(self.sequences)
        for rank in shown:
            entered = self.sequences.get(rank, [])
            lines.append(f"rank {rank} entered {len(entered)} collectives:")
            lines += [f"  {i:3} {entry}\n      at {entry.site}" for i, entry in enumerate(entered)]
        for rank, stack in sorted(self.waiting.items()):
            lines.append(f"rank {rank} is still in:\n{_indented(stack)}")
        return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    work: Connection
    watch: Connection


class Ranks:
    """The processes of all ranks; made by `running`."""

    def __init__(self, ranks: Sequence[_Rank], deadline: float) -> None:
        self._ranks = ranks
        self._deadline = deadline
        self.classes: set[str] = set()

    def start(self) -> Finding | None:
        """Wait until all are ready; what they entered meanwhile must agree, too."""
        answers, finding = self._answers(-1, (), START_DEADLINE)
        self.classes = {str(answer) for answer in answers.values()}
        return finding

    def step(self, number: int, actions: Step) -> Finding | None:
        for rank in self._ranks:
            rank.work.send(actions)
        return self._answers(number, actions, self._deadline)[1]

    def finish(self) -> list[Any]:
        """Let all ranks go; what each counted."""
        for rank in self._ranks:
            rank.work.send(None)
        return list(self._answers(-1, (), self._deadline)[0].values())

    def _answers(self, number: int, actions: Step, deadline: float) -> tuple[dict[int, Any], Finding | None]:
        values: dict[int, Any] = {}
        found = Finding(number, actions)
        until = time.monotonic() + deadline
        open_ranks = {rank.work: i for i, rank in enumerate(self._ranks)}
        while open_ranks and (left := until - time.monotonic()) > 0:
            for connection in wait(list(open_ranks), left):
                rank = open_ranks.pop(connection)  # type: ignore[call-overload]
                try:
                    kind, value, found.sequences[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    kind, value = "failed", f"process ended: {self._ranks[rank].process.poll()}"
                if kind == "failed":
                    found.failures[rank] = value
                    until = min(until, time.monotonic() + GRACE)
                else:
                    values[rank] = value
        for rank in open_ranks.values():
            found.sequences[rank], found.waiting[rank] = self._look(rank)
        found.parted = divergence(found.sequences)
        if found.parted or found.failures or found.waiting:
            return values, found
        return values, None

    def _look(self, rank: int) -> tuple[list[Entry], str]:
        """What a rank that does not answer has entered, and where it is."""
        watch = self._ranks[rank].watch
        try:
            watch.send("where are you?")
            if watch.poll(10):
                return watch.recv()
        except (EOFError, OSError):
            pass
        return [], "it does not answer: is it stopped, or in a loop without Python?"


@contextmanager
def running(ranks: int, setting: dict[str, Any], environment: dict[str, str], deadline: float) -> Iterator[Ranks]:
    """Processes for all ranks, ended on the way out; `environment` is all that they see."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-dp-"))
    processes: list[subprocess.Popen[bytes]] = []
    listener = Listener(str(folder / "socket"), "AF_UNIX", backlog=2 * ranks)
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", "fuzz_dp.rank_process", str(folder / "socket"), str(rank)]
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        ends = _accept(listener, ranks)
        for rank in range(ranks):
            ends["work", rank].send(setting)
        yield Ranks([_Rank(p, ends["work", i], ends["watch", i]) for i, p in enumerate(processes)], deadline)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def _accept(listener: Listener, ranks: int) -> dict[tuple[str, int], Connection]:
    ends: dict[tuple[str, int], Connection] = {}
    while len(ends) < 2 * ranks:
        end = listener.accept()
        kind, rank = end.recv()
        ends[kind, rank] = end
    return ends
