"""What is kept of the feature matrix, and its tables in docs/features.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feature_rows import (
    ATOM,
    EQUAL,
    FAULT,
    SERVED,
    STOCK,
    Case,
    Decision,
    case_of,
    means_something,
    rows,
)
from features import ENGINES, Engine, Feature
from generated import Part

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "features.md"
RECORDS = ROOT / "envs" / "features"


@dataclass(frozen=True)
class Record:
    """What was found of one engine.

    Attributes:
        date: of the last run.
        decisions: what comes of each configuration.
        engines: of each that was run, its `result` and the `decoder` that ran.
    """

    date: str
    decisions: dict[Case, Decision] = field(default_factory=dict[Case, Decision])
    engines: dict[Case, dict[str, Any]] = field(default_factory=dict[Case, dict[str, Any]])


def path_of(engine: Engine) -> Path:
    return RECORDS / f"{engine.name}-{engine.version}.json"


def read(engine: Engine) -> Record:
    """The record; an empty one if nothing was ever found."""
    if not path_of(engine).exists():
        return Record("")
    kept = json.loads(path_of(engine).read_text(encoding="utf-8"))
    decisions = {_case(one): Decision(one["state"], one["detail"]) for one in kept["decisions"]}
    engines = {_case(one): {"result": one["result"], "decoder": one["decoder"]} for one in kept["engines"]}
    return Record(kept["date"], decisions, engines)


def write(engine: Engine, record: Record) -> None:
    """Keep it."""
    kept = {
        "date": record.date,
        "decisions": [
            {**_named(case), "state": one.state, "detail": one.detail} for case, one in record.decisions.items()
        ],
        "engines": [{**_named(case), **ran} for case, ran in record.engines.items()],
    }
    path_of(engine).parent.mkdir(parents=True, exist_ok=True)
    path_of(engine).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _case(kept: dict[str, Any]) -> Case:
    return Case(kept["family"], tuple(kept["features"]))


def _named(case: Case) -> dict[str, Any]:
    return {"family": case.family, "features": list(case.features)}


def tables() -> str:
    """All tables in Markdown."""
    parts: list[str] = []
    for engine in ENGINES.values():
        record = read(engine)
        parts += [
            f"## {engine.title} {engine.version}",
            "",
            _summary(engine, record),
            "",
            *_families(engine, record),
            "",
        ]
        parts += [f"Features with each other, on `{engine.base}`:", "", *_pairs(engine, record), ""]
        parts += ["What is left to the engine's own, refused, or not there:", "", *_reasons(record), ""]
        parts += ["Served, and run elsewhere or not at all:", "", *_elsewhere(engine), ""]
    return "\n".join(parts).rstrip()


def _summary(engine: Engine, record: Record) -> str:
    wanted = rows(engine, record.decisions) if not untested(engine, record) else []
    equal = sum(record.engines.get(case, {}).get("result") == EQUAL for case in wanted)
    return f"{len(record.decisions)} configurations; {len(wanted)} engines, of which {equal} have run; {record.date}."


def cell(engine: Engine, record: Record, family: str, *features: Feature) -> str:
    """One cell: what comes of the configuration, and in how many engines the two met and gave what they have to."""
    if any(one.needs_gpu for one in features):
        return "GPU"
    if not means_something(engine.family(family), *features):
        return ""
    case = case_of(engine, family, *(one.name for one in features))
    decision = record.decisions.get(case)
    if decision is None:
        return "unknown"
    if decision.state not in (SERVED, STOCK):
        return decision.state
    ran = [found for case, found in record.engines.items() if _met(case, family, features, engine)]
    # An engine that is left to stock by a third feature says nothing about these two.
    ran = [one for one in ran if (one["decoder"] == ATOM) == (decision.state == SERVED)]
    if any(one["result"] != EQUAL for one in ran):
        return FAULT
    word = "equal" if decision.state == SERVED else "stock"
    return f"{word} {len(ran)}" if ran else word if decision.state == STOCK else "served"


def _met(case: Case, family: str, features: tuple[Feature, ...], engine: Engine) -> bool:
    there = all(one.name in case.features for one in features)
    return there and (len(features) > 1 or case.family == family)


def _families(engine: Engine, record: Record) -> Iterator[str]:
    names = [family.name for family in engine.families]
    yield from _head("feature", [f"`{name}`" for name in names])
    for feature in engine.features:
        shown = [cell(engine, record, name, feature) for name in names]
        yield f"| {feature.name} (`{feature.option}`) | {' | '.join(shown)} |"


def _pairs(engine: Engine, record: Record) -> Iterator[str]:
    features = engine.features
    numbers = {one.name: str(number) for number, one in enumerate(features, 1)}
    yield from _head("feature", [numbers[one.name] for one in features[:-1]])
    for index, feature in enumerate(features[1:], 1):
        shown = [cell(engine, record, engine.base, other, feature) for other in features[:index]]
        shown += [""] * (len(features) - 1 - index)
        yield f"| {numbers[feature.name]} {feature.name} | {' | '.join(shown)} |"


def _reasons(record: Record) -> Iterator[str]:
    """One line for each reason, with the features that it is about."""
    found: dict[tuple[str, str], list[str]] = {}
    for case, decision in record.decisions.items():
        if decision.detail:
            found.setdefault((decision.state, decision.detail), []).append(str(case))
    yield from _head("what", ["which", "why"])
    for (state, detail), which in sorted(found.items()):
        yield f"| {state} | {_few(which)} | {detail.replace('|', chr(92) + '|')} |"


def _elsewhere(engine: Engine) -> Iterator[str]:
    for one in (*engine.families, *engine.features):
        if one.not_run:
            yield f"- {one.name}: {one.not_run}"


def _few(which: list[str]) -> str:
    shown = "; ".join(which[:3])
    return f"{shown}; and {len(which) - 3} more" if len(which) > 3 else shown


def _head(first: str, columns: list[str]) -> Iterator[str]:
    yield f"| {first} | {' | '.join(columns)} |"
    yield "|---|" + "---|" * len(columns)


PART = Part(DOCUMENT, "feature_matrix", tables)


def untested(engine: Engine, record: Record) -> list[str]:
    """Declared meetings of which the record knows nothing."""
    families = itertools.product(engine.families, engine.features)
    singles = [(family.name, (one,)) for family, one in families]
    pairs = [(engine.base, pair) for pair in itertools.combinations(engine.features, 2)]
    return [f"{name} + {' + '.join(one.name for one in these)}" for name, these in (*singles, *pairs)
            if cell(engine, record, name, *these) == "unknown"]  # fmt: skip
