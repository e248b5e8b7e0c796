"""What `bench pcp` asks, and what follows from the parts that were measured; as plain data too, and back from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from atom_patches.bench import pcp_model
from atom_patches.bench.pcp_model import Estimate, Part, StackShape, Unmeasured, Variant
from atom_patches.bench.pcp_worker import NAME
from atom_patches.kernels.results import CaseReport, Ceilings, Machine, Timing
from atom_patches.runtime.link import Link

TARGETS = {
    (2, 16384): 1.5, (2, 65536): 1.7, (2, 262144): 1.85, (4, 65536): 3.1, (4, 262144): 3.5, (8, 65536): 5.2,
    (8, 262144): 6.4,
}  # fmt: skip
"""Least speed-up over one rank, by ranks and prompt length, at the shape of Qwen3.6-35B-A3B."""

SHARE = 0.9
"""Least share of the bound, on two ranks."""


@dataclass(frozen=True)
class Question:
    """What is asked for: a shape, prompt lengths, numbers of ranks, whose kernels, and the link to assume.

    Attributes:
        only: as for :func:`pcp_model.variants`.
    """

    shape: StackShape
    lengths: tuple[int, ...]
    worlds: tuple[int, ...]
    kernels: tuple[str, ...]
    link: Link
    only: frozenset[str] = frozenset()

    def parts(self) -> list[Part]:
        """Every part that has to be measured, once; what belongs to short prompts first."""
        found: dict[Part, None] = {}
        for length in self.lengths:
            for kernels in ("engine", *self.kernels):
                for part in pcp_model.parts(self.shape, length, 1, alone(kernels)):
                    found[part.measured()[0]] = None
            for world in self.worlds:
                for variant in self.variants(world):
                    for part in pcp_model.parts(self.shape, length, world, variant):
                        found[part.measured()[0]] = None
        return list(found)

    def variants(self, world: int) -> list[Variant]:
        """What can be run on so many ranks."""
        wanted = [variant for kernels in self.kernels for variant in pcp_model.variants(kernels, self.only)]
        return [variant for variant in wanted if pcp_model.runs(self.shape, world, variant)]


def alone(kernels: str) -> Variant:
    """One rank: what a split would do does not matter."""
    return Variant("contiguous", "redundant", "replicate", kernels)


@dataclass(frozen=True)
class Row:
    """One variant's result.

    Attributes:
        problem: why there is none.
        stock: speed-up over one rank with the engine's kernels.
        same: speed-up over one rank with the variant's own kernels.
        bound: seconds that no split can beat, with the variant's own kernels and exchanges.
    """

    length: int
    world: int
    variant: Variant
    problem: str = ""
    estimate: Estimate | None = None
    stock: float = 0.0
    same: float = 0.0
    bound: float = 0.0

    @property
    def share(self) -> float:
        return self.bound / self.estimate.seconds if self.estimate else 0.0


class Answer:
    """What was measured so far, and what follows from it."""

    def __init__(self, question: Question, machine: Machine) -> None:
        self.question = question
        self.machine = machine
        self.times: dict[Part, Timing] = {}
        self.served: dict[Part, str] = {}
        self.problems: dict[Part, str] = {}
        self.interrupted = ""

    def add(self, part: Part, report: CaseReport) -> None:
        found = report.providers[NAME].timing if NAME in report.providers else None
        self.served[part] = report.note
        if found is None:
            self.problems[part] = report.problem or "not timed"
        else:
            self.times[part] = found

    def include(self, other: Answer) -> None:
        """Take what another run measured.

        Raises:
            ValueError: it ran on another device, or with other versions.
        """
        for what in ("device", "versions"):
            theirs, ours = getattr(other.machine, what), getattr(self.machine, what)
            if theirs != ours:
                raise ValueError(f"its {what} is {theirs}, and this machine's {ours}. Measure everything here.")
        self.times |= other.times
        self.served |= {part: other.served[part] for part in other.times}

    def brief(self, part: Part) -> str:
        """What was found about a part, in a line."""
        if part in self.problems:
            return self.problems[part]
        return f"{self.times[part].seconds * 1e6:,.0f} us  {self.served[part]}"

    def seconds(self, part: Part) -> float:
        """Seconds of a part.

        Raises:
            Unmeasured: there is no time.
        """
        measured, times = part.measured()
        if measured not in self.times:
            raise Unmeasured(f"{measured.kind}, {measured.kernels}, {measured.rows} rows")
        return self.times[measured].seconds * times

    def alone(self, length: int, kernels: str) -> Estimate:
        """One rank's prefill."""
        return self._estimate(length, 1, alone(kernels))

    def rows(self) -> Iterator[Row]:
        """Every length, number of ranks and variant."""
        for length in self.question.lengths:
            for world in self.question.worlds:
                for variant in self.question.variants(world):
                    yield self._row(length, world, variant)

    def _row(self, length: int, world: int, variant: Variant) -> Row:
        try:
            stock, own = self.alone(length, "engine").seconds, self.alone(length, variant.kernels).seconds
            found = self._estimate(length, world, variant)
        except Unmeasured as error:
            return Row(length, world, variant, f"not measured: {error}")
        bound = found.bound(own, world)
        return Row(length, world, variant, "", found, stock / found.seconds, own / found.seconds, bound)

    def _estimate(self, length: int, world: int, variant: Variant) -> Estimate:
        return pcp_model.estimate(self.question.shape, length, world, variant, self.question.link, self.seconds)


def target(answer: Answer, row: Row) -> float | None:
    """The speed-up that a case is to reach, if one was set for this model."""
    return TARGETS.get((row.world, row.length)) if answer.question.shape.name != "tiny" else None


def document(answer: Answer, finished: bool = True) -> dict[str, Any]:
    """The results as plain data, in the form that `--json` writes; what follows from the parts only when finished."""
    question = answer.question
    return {
        "machine": asdict(answer.machine),
        "shape": asdict(question.shape),
        "link": asdict(question.link),
        "interrupted": answer.interrupted,
        "parts": [
            part._asdict() | {"served": answer.served.get(part, "")} | asdict(found)
            for part, found in answer.times.items()
        ],
        "problems": [part._asdict() | {"problem": why} for part, why in answer.problems.items()],
        "results": [_row_document(answer, row) for row in answer.rows()] if finished else [],
    }


def _row_document(answer: Answer, row: Row) -> dict[str, Any]:
    common = {"length": row.length, "world": row.world} | row.variant._asdict() | {"target": target(answer, row)}
    found = row.estimate
    if found is None:
        return common | {"problem": row.problem}
    return common | {
        "seconds": found.seconds,
        "slowest": found.slowest,
        "waiting": found.waiting,
        "host": found.host,
        "exchange": found.exchange,
        "exchanged": {kind: asdict(one) for kind, one in found.exchanged.items()},
        "speedup_over_stock": row.stock,
        "speedup_over_same_kernels": row.same,
        "bound": row.bound,
        "share_of_bound": row.share,
    }


def restored(found: dict[str, Any], question: Question) -> Answer:
    """The parts of an earlier run's document, to be put together for another question: another link, other ranks.

    Raises:
        LookupError, TypeError, ValueError: it is no such document, or one of another shape.
    """
    if found["shape"]["name"] != question.shape.name:
        raise ValueError(f"its shape is {found['shape']['name']}, not {question.shape.name}")
    machine: dict[str, Any] = found["machine"] | {"ceilings": Ceilings(**found["machine"]["ceilings"])}
    answer = Answer(question, Machine(**machine))
    answer.interrupted = found["interrupted"]
    for one in found["parts"]:
        part = _part(one)
        answer.times[part] = Timing(**{field.name: one[field.name] for field in fields(Timing)})
        answer.served[part] = one["served"]
    for one in found["problems"]:
        answer.problems[_part(one)] = one["problem"]
    return answer


def _part(found: dict[str, Any]) -> Part:
    part = Part(**{name: found[name] for name in Part._fields})
    return part._replace(pieces=tuple((rows, keys) for rows, keys in part.pieces))
