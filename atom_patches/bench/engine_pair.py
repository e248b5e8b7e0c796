"""Both sides of `bench engine`: two engines on one device, started at the same time and measured in turn."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from atom_patches.bench.answers import Answer
from atom_patches.bench.engine_cells import SIDES, Cell, Found, Model

OVERLAY = {"ATOM_PATCHES": "1", "ATOM_MODELS": "1", "ATOM_PATCH_VLLM_MODELS": "1"}
STOCK = {"cuda": {"ATOM_PATCHES": "0"}, "cpu": {"ATOM_PATCHES": "1", "ATOM_MODELS": "0"}}
"""vLLM's CPU platform lacks what a hybrid needs; this package brings it, to vLLM's own model, too."""

PROGRAM = ("-m", "atom_patches.bench.engine_side")
LOG_CHARACTERS = 3000

Tell = Callable[[str], None]


class SideEnded(RuntimeError):
    """An engine ended, or took too long; the message ends with its log's last lines."""


@dataclass(frozen=True)
class Asked:
    """How a model is measured.

    Attributes:
        layers: so many of the model's; 0: all of them.
        profile: also the GPU time of each kernel.
        limit: seconds for a start, and for a cell.
        folder: for the logs.
    """

    model: Model
    device: str
    layers: int
    rounds: int
    profile: bool
    limit: float
    folder: Path


def measure(asked: Asked, tell: Tell, save: Callable[[], None], found: Found) -> None:
    """Fill `found` cell by cell, and have it saved after each; what goes wrong is in `found.broken`."""
    try:
        with ExitStack() as engines:
            sides = {side: engines.enter_context(_side(side, asked)) for side in SIDES}
            for side, one in sides.items():
                found.sides[side] = one.receive()
                tell(f"{side}: {found.sides[side]['model']}, started in {found.sides[side]['seconds']} s")
            _measure(asked, sides, tell, save, found)
    except SideEnded as error:
        found.broken = str(error)
    except KeyboardInterrupt:
        found.broken = "interrupted"
    save()


def _measure(asked: Asked, sides: Mapping[str, Side], tell: Tell, save: Callable[[], None], found: Found) -> None:
    model = asked.model
    said = {side: one.ask(what="answers", size=min(model.lengths), steps=0) for side, one in sides.items()}
    found.answers = {side: [Answer(**one) for one in answers] for side, answers in said.items()}
    tell("; ".join(found.comparison.wrong) or "the answers are equal, but for rounding")
    for number in range(asked.rounds):
        for cell in model.cells:
            # Who comes first changes, so that neither always finds the device as the other one left it.
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            spans = {side: sides[side].ask(what=cell.what, size=cell.size, steps=model.steps) for side in order}
            found.add(cell, spans)
            times = ", ".join(f"{side} {1000 * found.rounds[cell][side][-1]:.3f} ms" for side in SIDES)
            tell(f"round {number + 1} of {asked.rounds}, {cell.label}: {times}, ratio {found.ratio(cell).median:.3f}")
            save()
    for cell in model.cells if asked.profile else []:
        found.kernels[cell] = _profile(cell, sides)
        gpu = ", ".join(f"{side} {one['gpu_us']:,.0f} us" for side, one in found.kernels[cell].items())
        tell(f"{cell.label}, on the GPU: {gpu}")
        save()


def _profile(cell: Cell, sides: Mapping[str, Side]) -> dict[str, Any]:
    return {side: one.ask(what=f"profile {cell.what}", size=cell.size, steps=8) for side, one in sides.items()}


@dataclass(frozen=True)
class Side:
    """An engine's process, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path
    limit: float

    def ask(self, **what: Any) -> Any:
        """What it answers.

        Raises:
            SideEnded: it ended, or says nothing in time.
        """
        try:
            self.connection.send_bytes(json.dumps(what).encode())
        except OSError as error:
            raise self._ended() from error
        return self.receive()

    def receive(self) -> Any:
        """What it says next.

        Raises:
            SideEnded: it ended, or says nothing in time.
        """
        try:
            if self.connection.poll(self.limit):
                return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        raise SideEnded(f"{self.log.stem} said nothing for {self.limit:g} s:\n{self._tail()}")

    def _ended(self) -> SideEnded:
        return SideEnded(f"{self.log.stem} ended with status {self.process.wait()}:\n{self._tail()}")

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_CHARACTERS:]


@contextmanager
def _side(side: str, asked: Asked) -> Iterator[Side]:
    """Start an engine; it is ended with the block."""
    ours, theirs = multiprocessing.Pipe()
    log = asked.folder / f"{asked.model.size}.{side}.log"
    plan = {
        "size": asked.model.size, "device": asked.device, "layers": asked.layers, "batches": asked.model.batches,
        "lengths": asked.model.lengths, "folder": str(asked.folder / f"{asked.model.size}.{side}"),
    }  # fmt: skip
    command = [sys.executable, *PROGRAM, str(theirs.fileno()), json.dumps(plan)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=_environment(side, asked.device), stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
    theirs.close()
    try:
        yield Side(process, ours, log, asked.limit)
    finally:
        process.kill()
        process.wait()
        ours.close()


def _environment(side: str, device: str) -> dict[str, str]:
    """This process's, without what would steer either side."""
    kept = {name: one for name, one in os.environ.items() if not name.startswith("ATOM_")}
    kept |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    if device == "cpu":
        kept |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return kept | (OVERLAY if side == "overlay" else STOCK[device])


def clock() -> Tell:
    """A progress line with the seconds since now."""
    began = time.monotonic()
    return lambda line: print(f"[{time.monotonic() - began:.0f} s] {line}", file=sys.stderr, flush=True)
