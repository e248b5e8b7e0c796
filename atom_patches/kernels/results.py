"""What a benchmark finds out, as plain data: it travels between processes, and torch is not imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Timing:
    """Seconds for one call: the median over `rounds`, half of which lie between `low` and `high`."""

    seconds: float
    low: float
    high: float
    rounds: int
    how: str


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: bytes per second, read plus written, and operations per second."""

    bandwidth: float
    rate: float
    how: str

    def floor(self, bytes: float, flops: float) -> float:
        """The least seconds that moving `bytes` and computing `flops` take."""
        return max(bytes / self.bandwidth, flops / self.rate)


@dataclass(frozen=True)
class Machine:
    """Where a run took place, and with what."""

    device: str
    kind: Literal["cuda", "cpu"]
    engine: str | None
    versions: Mapping[str, str]
    ceilings: Ceilings


State = Literal["timed", "refused", "wrong", "error"]


@dataclass(frozen=True)
class Served:
    """What one provider did with a case.

    `refused`: it cannot serve the call, for `reason`. `wrong`: its results are not the reference's, and it gets no
    time. `error`: it raised. `deviation` is its largest absolute difference from the reference.
    """

    state: State
    reason: str = ""
    deviation: float | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class CaseReport:
    """One case: the least that it costs, what each provider made of it, and whom `auto` takes.

    `problem` says why nothing was measured at all. `baseline` is the engine's own kernel as the engine itself calls it,
    where that differs from what the operator promises, such as to leave its inputs alone. `sets` counts the inputs that
    the timed calls went through, and `cached` is true when all of them together fit into the device's cache.
    """

    family: str
    operation: str
    label: str
    note: str = ""
    shape_class: str = ""
    bytes: float = 0.0
    flops: float = 0.0
    sets: int = 0
    cached: bool = False
    baseline: Timing | None = None
    auto: str | None = None
    providers: Mapping[str, Served] = field(default_factory=dict)
    problem: str = ""

    def seconds(self, provider: str | None) -> float | None:
        """The time of one provider, if it has one."""
        served = self.providers.get(provider) if provider is not None else None
        return served.timing.seconds if served is not None and served.timing is not None else None

    def ratio(self, provider: str | None) -> float | None:
        """How many times as fast as the engine's own kernel a provider is."""
        own = self.seconds(provider)
        engine = self.seconds("engine") if self.baseline is None else self.baseline.seconds
        return None if own is None or engine is None else engine / own
