"""The feature matrix: what it asks about, which engines it runs, what it calls a fault, and its tables."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import feature_table
import pytest
from checkpoints import RECIPES
from feature_decisions import judge, plain
from feature_rows import (
    ABSENT,
    ATOM,
    EQUAL,
    FAULT,
    OWN,
    REFUSED,
    SERVED,
    STOCK,
    Case,
    Decision,
    case_of,
    cases,
    decoder_of,
    like,
    means_something,
    options,
    ranks,
    rows,
)
from feature_table import PART, Record, cell, read, untested
from features import ENGINES, SGLANG, VLLM, Engine, Family, Feature

from atom_patches.core.settings import MODEL_FAMILIES

BOTH = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def feature(name: str, **more: Any) -> Feature:
    return Feature(name, f"--{name}", **more)


#: Two features that need no ranks, one that makes two, one that only means something then, and one left to the engine.
MADE_UP = Engine(
    name="made_up", title="Made Up", version="1", base="big", sizes=("ranks", "stages"), usual={"room": 1},
    families=(Family("small", "llama"), Family("big", "qwen3_moe", frozenset({"experts"}))),
    features=(
        feature("spread", options={"ranks": 2}),
        feature("dealt", options={"dealt": True}, needs="experts", on_ranks=True),
        feature("stages", options={"stages": 2}),
        feature("short", options={"room": 0}),
        feature("rounded", options={"digits": 2}, in_stock=True),
        feature("foreign"),
        feature("also", options={"ranks": 2}),
        feature("graphs", needs_gpu=True),
    ),
)  # fmt: skip


def decided(engine: Engine = MADE_UP, **other: str) -> dict[Case, Decision]:
    """Everything is served but what is with a feature of `other`, or `foreign`, which is left to stock."""
    states = {"foreign": STOCK, **other}
    return {
        case: Decision(next((states[name] for name in case.features if name in states), SERVED), "why")
        for case in cases(engine)
    }


# What is declared


@BOTH
def test_families_have_decoders_and_checkpoints(engine: Engine) -> None:
    assert {family.name for family in engine.families} <= set(MODEL_FAMILIES)
    assert {family.checkpoint for family in engine.families} <= set(RECIPES)
    assert len({one.name for one in engine.features}) == len(engine.features)


@BOTH
def test_every_two_meet_in_a_configuration(engine: Engine) -> None:
    asked = set(cases(engine))
    for family, one in itertools.product(engine.families, engine.features):
        if means_something(family, one):
            assert case_of(engine, family.name, one.name) in asked
    for one, other in itertools.combinations(engine.features, 2):
        if means_something(engine.family(engine.base), one, other):
            case = case_of(engine, engine.base, one.name, other.name)
            assert case in asked and {one.name, other.name} <= set(case.features)


def test_values_of_one_option_do_not_meet() -> None:
    trees, chains = SGLANG.feature("trees of drafts"), SGLANG.feature("chains of drafts")
    family = SGLANG.family(SGLANG.base)
    assert means_something(family, trees) and means_something(family, chains)
    assert not means_something(family, trees, chains)
    assert not means_something(VLLM.family("llama"), VLLM.feature("FP8 weights"), VLLM.feature("INT8 weights"))


def test_sizes_are_multiplied() -> None:
    case = Case("big", ("spread", "stages", "also"))
    assert options(MADE_UP, case) == {"ranks": 4, "stages": 2, "room": 1}
    assert ranks(MADE_UP, case) == 8
    both = case_of(SGLANG, "qwen3_next", "tensor parallelism", "data-parallel attention, idle ranks")
    assert (options(SGLANG, both)["tp_size"], options(SGLANG, both)["dp_size"]) == (4, 2)


def test_what_is_spread_is_asked_for_on_ranks() -> None:
    assert case_of(MADE_UP, "big", "dealt").features == ("spread", "dealt")
    assert case_of(MADE_UP, "big", "dealt", "also").features == ("dealt", "also")
    assert case_of(MADE_UP, "big", "dealt", "stages").features == ("spread", "dealt", "stages")


# What runs


def test_values_meet_in_engines() -> None:
    found = [case for case in rows(MADE_UP, decided()) if "foreign" not in case.features]
    for family in ("small", "big"):
        for name in ("spread", "stages", "short", "rounded", "also"):
            assert any(case.family == family and name in case.features for case in found)
            assert any(case.family == family and name not in case.features for case in found)
    assert {case.family for case in found if "dealt" in case.features} == {"big"}
    for one, other in itertools.combinations(("spread", "dealt", "stages", "short", "rounded", "also"), 2):
        assert any({one, other} <= set(case.features) for case in found)
    assert all(ranks(MADE_UP, case) <= (4 if case.family == "big" else 2) for case in found)


def test_what_is_left_to_the_engine_runs_once() -> None:
    found = rows(MADE_UP, decided())
    assert [case for case in found if "foreign" in case.features] == [Case("small", ("foreign",))]


def test_what_is_refused_or_not_run_is_in_no_engine() -> None:
    found = rows(MADE_UP, decided(short=REFUSED, rounded=ABSENT))
    assert not {"short", "rounded"} & {name for case in found for name in case.features}
    features = tuple(replace(one, not_run="why") if one.name == "stages" else one for one in MADE_UP.features)
    other = replace(MADE_UP, features=features)
    assert not any("stages" in case.features for case in rows(other, decided(other)))


def test_three_that_do_not_go_together() -> None:
    three = frozenset({"spread", "stages", "short"})
    other = replace(MADE_UP, not_together=(three,))
    assert Case("big", ("spread", "stages", "short")) in cases(other)
    assert not any(three <= set(case.features) for case in rows(other, decided(other)))


def test_whose_decoder_has_to_run() -> None:
    states = decided()
    assert decoder_of(MADE_UP, states, Case("big", ("spread", "short"))) == ATOM
    assert decoder_of(MADE_UP, states, Case("big", ("short", "foreign"))) == OWN
    assert like(MADE_UP, Case("big", ("spread", "short", "rounded"))) == Case("big", ("rounded",))


# What is a fault

CASE = Case("small", ("short",))
SAID = "made_up.models is not applied: does not serve: --short: leave it out"
REASON = "the ATOM decoder of X does not serve: --short: leave it out"
ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any], Decision]] = {
    "served": ({"decoder": True, "reason": "", "said": []}, {}, Decision(SERVED)),
    "left, with a line": (
        {"decoder": False, "reason": REASON, "said": [SAID]}, {}, Decision(STOCK, "--short: leave it out"),
    ),
    "left in silence": (
        {"decoder": False, "reason": REASON, "said": []}, {},
        Decision(FAULT, f"left to Made Up with 0 lines that say so: {REASON}"),
    ),
    "left, for another reason": (
        {"decoder": False, "reason": REASON, "said": ["made_up.models is not applied: --other"]}, {},
        Decision(FAULT, "the line does not name an option: made_up.models is not applied: --other"),
    ),
    "refused by name": (
        {"error": "stops the launch:\n  - why:\n    - --short is on", "ours": True}, {},
        Decision(REFUSED, "--short is on"),
    ),
    "refused without a name": (
        {"error": "no", "ours": True}, {}, Decision(FAULT, "refused without naming an option: no"),
    ),
    "the engine's own refusal": (
        {"error": "ValueError: no", "ours": False}, {"error": "ValueError: no", "ours": False},
        Decision(ABSENT, "ValueError: no"),
    ),
    "an error that stock has not": (
        {"error": "ValueError: no", "ours": False}, {"decoder": False, "reason": "", "said": []},
        Decision(FAULT, "Made Up with this package stops: ValueError: no"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_decisions(name: str) -> None:
    ours, stock, expected = ANSWERS[name]
    assert judge(MADE_UP, CASE, ours, stock) == expected


def test_a_message_in_one_line() -> None:
    assert plain("stops:\n  - one cannot:\n    - a is on\n    - b is on") == "a is on; b is on"
    assert plain("some\n  words") == "some words"


# The tables


def shown(record: Record, family: str, *names: str) -> str:
    return cell(MADE_UP, record, family, *(MADE_UP.feature(name) for name in names))


def ran(*engines: tuple[str, tuple[str, ...], str, str]) -> Record:
    found = {Case(family, names): {"result": result, "decoder": decoder} for family, names, result, decoder in engines}
    return Record("", decided(short=REFUSED), found)


def test_cells() -> None:
    record = ran(
        ("small", ("spread", "rounded"), EQUAL, ATOM),
        ("big", ("spread", "stages"), EQUAL, ATOM),
        ("big", ("spread", "foreign"), EQUAL, OWN),
        ("small", ("stages",), "token 3 is 4, not 5", ATOM),
    )
    assert shown(record, "small", "spread") == "equal 1"
    assert shown(record, "big", "spread") == "equal 1", "the engine's own decoder ran in the other one"
    assert shown(record, "big", "spread", "stages") == "equal 1"
    assert shown(record, "big", "rounded") == "served", "no engine ran with both"
    assert shown(record, "small", "stages") == FAULT
    assert shown(record, "big", "foreign") == "stock 1"
    assert shown(record, "small", "foreign") == "stock"
    assert shown(record, "big", "short") == REFUSED
    assert shown(record, "small", "dealt") == "", "it has no experts"
    assert shown(record, "big", "graphs") == "GPU"
    assert shown(Record(""), "big", "spread") == "unknown"


def test_records_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_table, "RECORDS", tmp_path)
    record = replace(ran(("big", ("spread", "stages"), EQUAL, ATOM)), date="2026-01-01")
    feature_table.write(MADE_UP, record)
    assert read(MADE_UP) == record
    assert untested(MADE_UP, record) == []
    fewer = replace(record, decisions={case: one for case, one in record.decisions.items() if case != CASE})
    assert untested(MADE_UP, fewer) == ["small + short"]


@BOTH
def test_the_record_knows_every_declared_feature(engine: Engine) -> None:
    assert untested(engine, read(engine)) == [], "run: make feature-matrix"


@BOTH
def test_the_record_has_no_fault(engine: Engine) -> None:
    record = read(engine)
    assert [str(case) for case, one in record.decisions.items() if one.state == FAULT] == []
    assert [str(case) for case, one in record.engines.items() if one["result"] != EQUAL] == []


def test_the_document_is_what_the_records_say() -> None:
    text = PART.document.read_text(encoding="utf-8")
    assert text == PART.updated(text), "run: make feature-matrix"
