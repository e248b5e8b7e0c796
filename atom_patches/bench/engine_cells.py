"""What `bench engine` measures, and what follows from the times: medians, ratios and their intervals, findings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atom_patches.bench.answers import Answer, Comparison, compared
from atom_patches.bench.interval import Interval, interval

SIDES = ("stock", "overlay")
LEAST = 0.99
"""No cell may be slower than this times stock."""

CLOSE = {"cuda": 0.15, "cpu": 1e-3}
"""How far log-probabilities may be apart: in bfloat16 on a GPU, in float32 on a CPU."""


class Cell(NamedTuple):
    """A decode step of so many requests, or the prefill of a prompt of so many tokens."""

    what: str
    size: int

    @property
    def label(self) -> str:
        return f"decode step, batch {self.size}" if self.what == "decode" else f"prefill of {self.size:,}"


@dataclass(frozen=True)
class Model:
    """A model of ``seeded_model``, its name for people, and the cells that it is measured in.

    Attributes:
        steps: decode steps that are timed in each round.
    """

    size: str
    label: str
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    steps: int = 48

    @property
    def cells(self) -> list[Cell]:
        return [*(Cell("decode", one) for one in self.batches), *(Cell("prefill", one) for one in self.lengths)]


MODELS = {
    model.size: model
    for model in (
        Model("qwen35b", "Qwen3.6-35B-A3B shape, 12 layers", (1, 16, 64), (4096, 16384, 65536)),
        Model("qwen8b", "Qwen3-8B shape", (16,), (16384,)),
        Model("tiny", "a hybrid for the CPU", (1, 2), (128,), steps=4),
        Model("tiny-dense", "a dense model for the CPU", (2,), (128,), steps=4),
    )
}
DEFAULT = {"cuda": ("qwen35b", "qwen8b"), "cpu": ("tiny", "tiny-dense")}

#: The targets and stretches that were set, by model and cell.
TARGETS = {
    ("qwen35b", Cell("decode", 1)): (1.05, 1.10), ("qwen35b", Cell("decode", 16)): (1.10, 1.18),
    ("qwen35b", Cell("decode", 64)): (1.06, 1.10), ("qwen35b", Cell("prefill", 4096)): (1.10, 1.15),
    ("qwen35b", Cell("prefill", 16384)): (1.15, 1.20), ("qwen35b", Cell("prefill", 65536)): (1.08, 1.12),
    ("qwen8b", Cell("decode", 16)): (1.03, 1.06), ("qwen8b", Cell("prefill", 16384)): (1.03, 1.06),
}  # fmt: skip


@dataclass
class Found:
    """What was measured of one model so far.

    Attributes:
        sides: what each side says about itself.
        answers: of each side, with which both are compared.
        rounds: seconds of a cell in each round, by side: the median of what the round timed.
        raw: every time of each round, by side.
        kernels: GPU time of a step by kernel, where it was asked for, by side.
        broken: why there is no more.
    """

    model: Model
    device: str
    sides: dict[str, Any] = field(default_factory=dict[str, Any])
    answers: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])
    rounds: dict[Cell, dict[str, list[float]]] = field(default_factory=dict[Cell, dict[str, list[float]]])
    raw: dict[Cell, dict[str, list[list[float]]]] = field(default_factory=dict[Cell, dict[str, list[list[float]]]])
    kernels: dict[Cell, dict[str, Any]] = field(default_factory=dict[Cell, dict[str, Any]])
    broken: str = ""

    def add(self, cell: Cell, spans: Mapping[str, Sequence[float]]) -> None:
        """One round of a cell, of both sides."""
        for side in SIDES:
            self.rounds.setdefault(cell, {}).setdefault(side, []).append(statistics.median(spans[side]))
            self.raw.setdefault(cell, {}).setdefault(side, []).append(list(spans[side]))

    def seconds(self, cell: Cell, side: str) -> Interval:
        return interval(self.rounds[cell][side])

    def ratio(self, cell: Cell) -> Interval:
        """How many times as fast as stock, round by round: both sides of a round were measured one after the other."""
        pairs = zip(self.rounds[cell]["stock"], self.rounds[cell]["overlay"], strict=True)
        return interval([stock / overlay for stock, overlay in pairs])

    @property
    def comparison(self) -> Comparison:
        """How far the answers are apart; of none, while the sides have not given theirs."""
        stock, overlay = (self.answers.get(side, []) for side in SIDES)
        return compared(stock, overlay, CLOSE[self.device])

    def findings(self) -> Iterator[str]:
        """What makes the run a failed one."""
        name = self.model.size
        if self.broken:
            yield f"INCOMPLETE  {name}: {self.broken}"
        yield from (f"DIFFERENT  {name}: {one}" for one in self.comparison.wrong)
        theirs = str(self.sides.get("overlay", {}).get("model", ""))
        if theirs and not theirs.startswith("atom_patches."):
            yield f"NOT APPLIED  {name}: the overlay's side ran {theirs}"
        for cell in self.rounds:
            ratio = self.ratio(cell)
            if self.device == "cuda" and ratio.median < LEAST:
                yield f"SLOWER  {name}, {cell.label}: {ratio.median:.3f} times as fast as stock"

    def notes(self) -> Iterator[str]:
        """What a reader should know, and is no failure."""
        for cell in self.rounds:
            ratio = self.ratio(cell)
            if self.device == "cuda" and ratio.low < LEAST <= ratio.median:
                yield f"note: {self.model.size}, {cell.label}: the interval reaches down to {ratio.low:.3f}"

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.model.size,
            "label": self.model.label,
            "device": self.device,
            "sides": self.sides,
            "answers": self.comparison.document() if self.answers else None,
            "cells": [self._cell(cell) for cell in self.rounds],
            "broken": self.broken,
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        target = TARGETS.get((self.model.size, cell))
        return {
            **cell._asdict(),
            "label": cell.label,
            **{side: self.seconds(cell, side)._asdict() for side in SIDES},
            "ratio": self.ratio(cell)._asdict(),
            "target": target and {"least": target[0], "stretch": target[1]},
            "rounds": self.rounds[cell],
            "raw": self.raw[cell],
            "gpu": self.kernels.get(cell),
        }
