"""What `bench engine` measures, and what follows from the times: medians, ratios and their intervals, findings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atom_patches.bench.answers import Answer, Comparison, compared
from atom_patches.bench.interval import Interval, interval
from atom_patches.bench.seeded_model import SIZES, HybridSize

LEAST = 0.99
"""No cell may be slower than this times stock."""

CLOSE = {"cuda": 0.15, "cpu": 1e-3}
"""How far log-probabilities may be apart: in bfloat16 on a GPU, in float32 on a CPU."""

WRAPPER = ".models.transformers"
"""In the names of classes with which engines serve models that they have no class of their own for."""

NEEDS = {"kv_cache": "qk_rope"}
"""Fusions that are part of another one."""


def switched_off(fusion: str) -> frozenset[str]:
    """What a side without `fusion` lacks."""
    return frozenset({fusion, *(part for part, whole in NEEDS.items() if whole == fusion)})


def side_without(fusion: str) -> str:
    """The side's name."""
    return f"without {fusion}"


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
    def experts(self) -> bool:
        """Whether its layers have experts."""
        return isinstance(SIZES[self.size], HybridSize)

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
class Fusions:
    """What is known of the sides that lack a fusion.

    Attributes:
        built: the fusions that each side's decoder was built with, by side.
        measured: those that a side was started without.
        unused: those that the overlay's decoder was not built with, so that no side needs to lack them.
        lost: why a side that lacks one did not start.
    """

    built: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    measured: list[str] = field(default_factory=list[str])
    unused: list[str] = field(default_factory=list[str])
    lost: list[str] = field(default_factory=list[str])

    def lacking(self, fusion: str) -> list[str]:
        """What the overlay's decoder has, and that of the side without `fusion` should not have."""
        return [one for one in self.built["overlay"] if one in switched_off(fusion)]

    def label(self, fusion: str) -> str:
        """All that the side lacks, for people."""
        return " and ".join(self.lacking(fusion))

    def wrong(self) -> Iterator[str]:
        """Sides that were not built as they should."""
        for fusion in self.measured:
            side, lacking = side_without(fusion), self.lacking(fusion)
            wanted = [one for one in self.built["overlay"] if one not in lacking]
            if self.built[side] != wanted:
                yield f"the side {side} has {_listed(self.built[side])}, and should have {_listed(wanted)}"

    def document(self) -> dict[str, Any]:
        """As plain data."""
        measured = {fusion: {"side": side_without(fusion), "label": self.label(fusion)} for fusion in self.measured}
        return {"built": self.built, "measured": measured, "unused": self.unused, "lost": self.lost}


def _listed(fusions: Sequence[str]) -> str:
    return ", ".join(fusions) or "none"


@dataclass
class Found:
    """What was measured of one model so far.

    Attributes:
        engine: its name for people.
        expected: the fusions that the overlay's decoder must have.
        sides: what each side says about itself.
        fusions: of the sides that lack one, if there are any.
        answers: of each side, which are compared with stock's.
        rounds: seconds of a cell in each round, by side: the median of what the round timed.
        raw: every time of each round, by side.
        kernels: GPU time of a step by kernel, where it was asked for, by side.
        broken: why there is no more.
    """

    model: Model
    device: str
    engine: str = ""
    expected: list[str] = field(default_factory=list[str])
    sides: dict[str, Any] = field(default_factory=dict[str, Any])
    fusions: Fusions = field(default_factory=Fusions)
    answers: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])
    rounds: dict[Cell, dict[str, list[float]]] = field(default_factory=dict[Cell, dict[str, list[float]]])
    raw: dict[Cell, dict[str, list[list[float]]]] = field(default_factory=dict[Cell, dict[str, list[list[float]]]])
    kernels: dict[Cell, dict[str, Any]] = field(default_factory=dict[Cell, dict[str, Any]])
    broken: str = ""

    def add(self, cell: Cell, spans: Mapping[str, Sequence[float]]) -> None:
        """One round of a cell, of all sides."""
        for side, times in spans.items():
            self.rounds.setdefault(cell, {}).setdefault(side, []).append(statistics.median(times))
            self.raw.setdefault(cell, {}).setdefault(side, []).append(list(times))

    def seconds(self, cell: Cell, side: str) -> Interval:
        return interval(self.rounds[cell][side])

    def ratio(self, cell: Cell, before: str = "stock") -> Interval:
        """How many times as fast as another side the overlay is, round by round: a round's sides follow each other."""
        pairs = zip(self.rounds[cell][before], self.rounds[cell]["overlay"], strict=True)
        return interval([other / overlay for other, overlay in pairs])

    def comparison(self, side: str = "overlay") -> Comparison:
        """How far its answers are from stock's; of none, while the sides have not given theirs."""
        return compared(self.answers.get("stock", []), self.answers.get(side, []), CLOSE[self.device])

    def different(self) -> Iterator[str]:
        """Answers that differ from stock's by more than rounding explains."""
        yield from self.comparison().wrong
        for side in (side_without(fusion) for fusion in self.fusions.measured):
            yield from (f"{side}, {one}" for one in self.comparison(side).wrong)

    def findings(self) -> Iterator[str]:
        """What makes the run a failed one."""
        name = self.model.size
        yield from (f"INCOMPLETE  {name}: {why}" for why in [*self.fusions.lost, self.broken] if why)
        yield from (f"DIFFERENT  {name}: {one}" for one in self.different())
        yield from (f"{one[0]}  {name}: {one[1]}" for one in self._misbuilt())
        yield from (f"NOT AS ASKED  {name}: {one}" for one in self.fusions.wrong())
        for cell in self.rounds:
            ratio = self.ratio(cell)
            if self.device == "cuda" and ratio.median < LEAST:
                yield f"SLOWER  {name}, {cell.label}: {ratio.median:.3f} times as fast as stock"

    def _misbuilt(self) -> Iterator[tuple[str, str]]:
        """Sides whose model is not the one that they are to be measured with."""
        ran = {side: str(about.get("model", "")) for side, about in self.sides.items()}
        if (own := ran.get("stock", "")).startswith("atom_patches.") or WRAPPER in own:
            yield "NOT STOCK", f"stock's side ran {own}"
        theirs = ran.get("overlay", "")
        if theirs and not theirs.startswith("atom_patches."):
            yield "NOT APPLIED", f"the overlay's side ran {theirs}"
        elif theirs and (lacking := [one for one in self.expected if one not in self.sides["overlay"]["fusions"]]):
            yield "NOT AS ASKED", f"the overlay lacks {_listed(lacking)}"

    def notes(self) -> Iterator[str]:
        """What a reader should know, and is no failure."""
        for cell in self.rounds if self.device == "cuda" else []:
            ratio, where = self.ratio(cell), f"note: {self.model.size}, {cell.label}:"
            if ratio.low < LEAST <= ratio.median:
                yield f"{where} the interval reaches down to {ratio.low:.3f}"
            for fusion in self.fusions.measured:
                gain = self.ratio(cell, side_without(fusion)).median
                if gain < LEAST:
                    yield f"{where} {gain:.3f} times as fast with {self.fusions.label(fusion)} as without"

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.model.size,
            "label": self.model.label,
            "engine": self.engine,
            "device": self.device,
            "sides": self.sides,
            "answers": self.comparison().document() if self.answers else None,
            **({"fusions": self.fusions.document()} if self.fusions.built else {}),
            "cells": [self._cell(cell) for cell in self.rounds],
            "broken": self.broken,
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        target = TARGETS.get((self.model.size, cell))
        fusions = {fusion: self._with_and_without(cell, fusion) for fusion in self.fusions.measured}
        return {
            **cell._asdict(),
            "label": cell.label,
            **{side: self.seconds(cell, side)._asdict() for side in ("stock", "overlay")},
            "ratio": self.ratio(cell)._asdict(),
            **({"fusions": fusions} if fusions else {}),
            "target": target and {"least": target[0], "stretch": target[1]},
            "rounds": self.rounds[cell],
            "raw": self.raw[cell],
            "gpu": self.kernels.get(cell),
        }

    def _with_and_without(self, cell: Cell, fusion: str) -> dict[str, Any]:
        side = side_without(fusion)
        return {"without": self.seconds(cell, side)._asdict(), "ratio": self.ratio(cell, side)._asdict()}
