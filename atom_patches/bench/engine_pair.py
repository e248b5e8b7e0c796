"""The sides of `bench engine`: engines on one device, stock, overlay and others, measured in turn."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from atom_patches.bench.answers import Answer
from atom_patches.bench.engine_cells import Cell, Found, Model, side_without, switched_off
from atom_patches.bench.engines import Engine
from atom_patches.core import settings

LOG_CHARACTERS = 3000

Tell = Callable[[str], None]


class SideEnded(RuntimeError):
    """An engine ended, or took too long; the message ends with its log's last lines."""


@dataclass(frozen=True)
class Asked:
    """How a model is measured.

    Attributes:
        engine: whose sides they are.
        fusions: for each, one more side lacks it, if the overlay's decoder has it.
        options: of the engine, for all sides, over those that they have.
        layers: so many of the model's; 0: all of them.
        profile: also the GPU time of each kernel.
        limit: seconds for a start, and for a cell.
        folder: for the logs.
    """

    engine: Engine
    model: Model
    device: str
    layers: int
    rounds: int
    profile: bool
    limit: float
    folder: Path
    fusions: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Setup:
    """A side's name, and the variables that make it what it is."""

    side: str
    variables: Mapping[str, str]


def pair(engine: Engine, device: str) -> tuple[Setup, Setup]:
    """The sides of every run."""
    return Setup("stock", engine.stock[device]), Setup("overlay", engine.overlay)


def without(engine: Engine, fusion: str) -> Setup:
    """The overlay, but for one fusion and what is nothing without it."""
    left = [one for one in settings.FUSIONS if one not in switched_off(fusion)]
    return Setup(side_without(fusion), {**engine.overlay, "ATOM_FUSIONS": ",".join(left) or "0"})


def measure(asked: Asked, tell: Tell, save: Callable[[], None], found: Found) -> None:
    """Fill `found` cell by cell, and have it saved after each; what goes wrong is in `found.broken`."""
    try:
        with ExitStack() as engines:
            sides = {one.side: engines.enter_context(_side(one, asked)) for one in pair(asked.engine, asked.device)}
            if asked.fusions:
                sides |= _lacking(asked, sides["overlay"], engines, tell, found)
            for name, side in sides.items():
                if name not in found.sides:
                    _hear(name, side, tell, found)
            _measure(asked, sides, tell, save, found)
    except SideEnded as error:
        found.broken = str(error)
    except KeyboardInterrupt:
        found.broken = "interrupted"
    save()


def _lacking(asked: Asked, overlay: Side, engines: ExitStack, tell: Tell, found: Found) -> dict[str, Side]:
    """A side without each fusion that the overlay's decoder has; one that does not start is named, and left out.

    One starts after the other: what an engine needs while it starts is more than it keeps.
    """
    sides: dict[str, Side] = {}
    _hear("overlay", overlay, tell, found)
    built = found.fusions.built["overlay"] = found.sides["overlay"]["fusions"]
    found.fusions.unused = [one for one in asked.fusions if one not in built]
    for fusion in (one for one in asked.fusions if one in built):
        name = side_without(fusion)
        side = engines.enter_context(_side(without(asked.engine, fusion), asked))
        try:
            _hear(name, side, tell, found)
            found.fusions.built[name] = found.sides[name]["fusions"]
        except SideEnded as error:
            found.fusions.lost.append(str(error))
            tell(f"{name}: did not start")
            side.process.kill()  # its memory is the next one's
            side.process.wait()
            continue
        found.fusions.measured.append(fusion)
        sides[name] = side
    return sides


def _hear(name: str, side: Side, tell: Tell, found: Found) -> None:
    about = found.sides[name] = side.receive()
    fused = f" with the fusions {', '.join(about['fusions'])}" if about["fusions"] else ""
    tell(f"{name}: {about['model']}{fused}, {about['graphs']}, started in {about['seconds']} s")


def _measure(asked: Asked, sides: Mapping[str, Side], tell: Tell, save: Callable[[], None], found: Found) -> None:
    model = asked.model
    said = {side: one.ask(what="answers", size=min(model.lengths), steps=0) for side, one in sides.items()}
    found.answers = {side: [Answer(**one) for one in answers] for side, answers in said.items()}
    tell("; ".join(found.different()) or "the answers are equal, but for rounding")
    for number in range(asked.rounds):
        for cell in model.cells:
            # Who comes first changes, so that none always finds the device as the same other one left it.
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            spans = {side: sides[side].ask(what=cell.what, size=cell.size, steps=model.steps) for side in order}
            found.add(cell, spans)
            times = ", ".join(f"{side} {1000 * found.rounds[cell][side][-1]:.3f} ms" for side in sides)
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
def _side(setup: Setup, asked: Asked) -> Iterator[Side]:
    """Start an engine; it is ended with the block."""
    ours, theirs = multiprocessing.Pipe()
    name = f"{asked.model.size}.{setup.side.replace(' ', '-')}"
    log = asked.folder / f"{name}.log"
    plan = {
        "size": asked.model.size, "device": asked.device, "layers": asked.layers, "batches": asked.model.batches,
        "lengths": asked.model.lengths, "folder": str(asked.folder / name), "sides": 2 + len(asked.fusions),
        "options": dict(asked.options),
    }  # fmt: skip
    command = [sys.executable, *asked.engine.program, str(theirs.fileno()), json.dumps(plan)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=asked.engine.environment(asked.device, setup.variables), stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
    theirs.close()
    try:
        yield Side(process, ours, log, asked.limit)
    finally:
        process.kill()
        process.wait()
        ours.close()


def clock() -> Tell:
    """A progress line with the seconds since now."""
    began = time.monotonic()
    return lambda line: print(f"[{time.monotonic() - began:.0f} s] {line}", file=sys.stderr, flush=True)
