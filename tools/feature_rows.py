"""Which configurations the feature matrix asks engines about, and which of those it runs.

Every feature meets every family, and every other feature with one family, in a configuration of its own: that takes no
engine. Of what is served then, few engines are run in which every two values of all factors meet (tools/pairwise.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from features import Engine, Family, Feature
from pairwise import Row, pairwise

OFF = ""
#: Ranks of one engine: of the base family, and of others.
MOST_RANKS, FEW_RANKS = 4, 2

SERVED, STOCK, REFUSED, ABSENT, FAULT = "served", "stock", "refused", "absent", "FAULT"
"""By an ATOM decoder; by the engine's own; refused by name; not by this engine, whoever's decoder; none of these."""

EQUAL = "equal"
"""The result of an engine whose answers are right."""
ATOM, OWN = "ATOM", "stock"
"""Whose decoder ran."""


@dataclass(frozen=True)
class Case:
    """A family with features, which stand in the order of their declaration."""

    family: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join((self.family, *self.features))


@dataclass(frozen=True)
class Decision:
    """What comes of a configuration, and the words that say so."""

    state: str
    detail: str = ""


def case_of(engine: Engine, family: str, *features: str) -> Case:
    """The case in which the features can meet: on several ranks, where one of them needs that."""
    case = _ordered(engine, family, set(features))
    if any(engine.feature(name).on_ranks for name in features) and not _spread(engine, case):
        return _ordered(engine, family, {*features, engine.features[0].name})
    return case


def _ordered(engine: Engine, family: str, features: set[str]) -> Case:
    return Case(family, tuple(one.name for one in engine.features if one.name in features))


def options(engine: Engine, case: Case) -> dict[str, Any]:
    """The engine's options for a case."""
    found: dict[str, Any] = {**engine.usual, **engine.family(case.family).options}
    for name in case.features:
        asked = dict(engine.feature(name).options)
        for size in engine.sizes:
            if size in asked:
                asked[size] *= found.get(size, 1)
        found |= asked
    return found


def env(engine: Engine, case: Case) -> dict[str, str]:
    """The environment of a case."""
    found = dict(engine.family(case.family).env)
    for name in case.features:
        found |= engine.feature(name).env
    return found


def ranks(engine: Engine, case: Case) -> int:
    """How many processes compute."""
    return math.prod(options(engine, case).get(size, 1) for size in engine.sizes)


def _spread(engine: Engine, case: Case) -> bool:
    """Whether layers, and not stages alone, are on several ranks."""
    asked = options(engine, case)
    return any(asked.get(size, 1) > 1 for size in engine.sizes[:-1])


def means_something(family: Family, *features: Feature) -> bool:
    """Whether the family has what the features are about, and they can be asked for here, together."""
    if sum(bool(one.weights) for one in features) > 1 or len({one.option for one in features}) < len(features):
        return False
    return not any(one.needs_gpu or one.needs and one.needs not in family.has for one in features)


def cases(engine: Engine) -> list[Case]:
    """The configurations to ask about, each once."""
    return list(dict.fromkeys(_cases(engine)))


def _cases(engine: Engine) -> Iterator[Case]:
    for family in engine.families:
        yield Case(family.name)
        yield from (case_of(engine, family.name, one.name) for one in engine.features if means_something(family, one))
    base = engine.family(engine.base)
    pairs = [pair for pair in itertools.combinations(engine.features, 2) if means_something(base, *pair)]
    yield from (case_of(engine, base.name, *(one.name for one in pair)) for pair in pairs)
    yield from (case_of(engine, base.name, *three) for three in engine.not_together)


def like(engine: Engine, case: Case) -> Case:
    """The case on one rank that answers the same prompts with the same numbers, but for rounding."""
    return Case(case.family, tuple(name for name in case.features if engine.feature(name).in_stock))


def decoder_of(engine: Engine, decided: Mapping[Case, Decision], case: Case) -> str:
    """Whose decoder has to run: the engine's own, where one of the features leaves the model to that."""
    alone = [case_of(engine, case.family, name) for name in case.features]
    return OWN if any(decided[one].state == STOCK for one in alone) else ATOM


def rows(engine: Engine, decided: Mapping[Case, Decision]) -> list[Case]:
    """The engines to run."""
    found = _decoders(engine, decided)
    for one in engine.features:
        if not one.not_run and not one.needs_gpu and (family := _left(engine, decided, one)):
            found.append(case_of(engine, family, one.name))
    return list(dict.fromkeys(found))


def _left(engine: Engine, decided: Mapping[Case, Decision], feature: Feature) -> str:
    """The first family that is left to the engine's own decoder with a feature."""
    for family in (one for one in engine.families if not one.not_run):
        decision = decided.get(case_of(engine, family.name, feature.name))
        if decision is not None and decision.state == STOCK:
            return family.name
    return ""


def _decoders(engine: Engine, decided: Mapping[Case, Decision]) -> list[Case]:
    """Cases of ATOM decoders in which every two values meet."""
    base = engine.base

    def served(case: Case) -> bool:
        return decided[case].state == SERVED

    def alone(feature: Feature) -> bool:
        if feature.not_run or not means_something(engine.family(base), feature):
            return False
        return served(case_of(engine, base, feature.name))

    there = [one for one in engine.features if alone(one)]
    families = [one.name for one in engine.families if not one.not_run]
    factors = {"family": families, **{one.name: (OFF, one.name) for one in there}}

    def allowed(row: Row) -> bool:
        family, *rest = row
        on = [name for name in rest if name != OFF]
        case = _ordered(engine, family, set(on))
        if any(engine.feature(name).on_ranks for name in on) and not _spread(engine, case):
            return False
        if ranks(engine, case) > (MOST_RANKS if family == base else FEW_RANKS):
            return False
        if any(three <= set(case.features) for three in engine.not_together):
            return False
        if not means_something(engine.family(family), *map(engine.feature, on)):
            return False
        return served(Case(family)) and all(
            [served(case_of(engine, family, name)) for name in on]
            + [served(case_of(engine, base, *pair)) for pair in itertools.combinations(on, 2)]
        )

    return [
        _ordered(engine, family, {name for name in rest if name != OFF}) for family, *rest in pairwise(factors, allowed)
    ]
