"""The matrix of tools/pcp_matrix.py: what it selects, what it expects to be refused, and what it calls different."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_runs
import pcp_combos
import pcp_matrix
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairs, pairwise
from pcp_combos import CASES, FACTORS, MODELS, NONE, WORLDS, Combo
from pcp_differences import first_difference, unlike_asked

from atom_patches.vllm.adapters.pcp_experts import unserved_experts
from atom_patches.vllm.pcp._recurrence import unserved_heads

HYBRID = {"qwen3_next", "qwen3_next_heads", "qwen3_5", "qwen3_5_moe"}
EXPERTS = {"qwen3_next", "qwen3_next_heads", "qwen3_5_moe"}
#: 2 key heads, or 12; experts of 384 channels that are cut in multiples of 32.
HEADS_DEALT = {("qwen3_next_heads", ranks) for ranks in "2346"} | {(model, "2") for model in HYBRID}


def inadmissible(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether no served combination has both values, each given with its factor."""
    pair = dict((one, other))
    model, gdn, moe, ranks = (pair.get(factor, "") for factor in ("model", "gdn", "moe", "ranks"))
    if model and gdn:
        return (gdn != NONE) != (model in HYBRID)
    if model == "qwen3_next_heads" and pair.get("case") == "preemption":
        return True
    if model and moe:
        return (moe != NONE) != (model in EXPERTS)
    if gdn and moe:
        return gdn == NONE and moe != NONE  # the dense model has no experts
    return ranks == "8" and (gdn == "head_all_to_all" or moe == "shard")


def meets(rows: list[Combo], one: tuple[str, str], other: tuple[str, str]) -> bool:
    return any(getattr(row, one[0]) == one[1] and getattr(row, other[0]) == other[1] for row in rows)


@pytest.mark.parametrize("factors", list(itertools.combinations(FACTORS, 2)), ids="-".join)
def test_every_two_values_meet(factors: tuple[str, str]) -> None:
    first, second = factors
    rows = pcp_combos.served()
    for value, other in itertools.product(FACTORS[first], FACTORS[second]):
        pair = (first, value), (second, other)
        assert meets(rows, *pair) != inadmissible(*pair), pair


def test_what_never_runs_is_refused() -> None:
    rows = pcp_combos.refused()
    for pair in ((("ranks", "8"), ("gdn", "head_all_to_all")), (("ranks", "8"), ("moe", "shard"))):
        assert meets(rows, *pair)
    heads = {(row.model, row.ranks) for row in rows if row.gdn == "head_all_to_all"}
    assert heads == set(itertools.product(HYBRID, WORLDS)) - HEADS_DEALT
    assert {(row.model, row.ranks) for row in rows if row.moe == "shard"} == {(model, "8") for model in EXPERTS}


def test_no_combination_is_there_twice() -> None:
    rows = pcp_combos.selection(set(WORLDS), set(MODELS))
    assert len(rows) == len(set(rows))
    assert len(rows) < 100, "the matrix takes a minute for two or three of them"


def test_a_part_is_a_part() -> None:
    everything = pcp_combos.selection(set(WORLDS), set(MODELS))
    part = pcp_combos.selection({"2", "8"}, {"qwen3", "qwen3_next"}, limit=4)
    assert set(part) <= set(everything)
    assert {row.ranks for row in part} == {"2", "8"} and {row.model for row in part} == {"qwen3", "qwen3_next"}
    assert sum(not pcp_combos.refused_words(row) for row in part) == 4


def test_cases_and_checkpoints_exist() -> None:
    from checkpoints import RECIPES

    assert set(CASES) == set(pcp_matrix.WAVES)
    assert set(MODELS) <= set(RECIPES)


FACTOR_VALUES = [f"v{j}" for j in range(4)]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 2**32))
def test_pairwise(sizes: list[int], seed: int) -> None:
    """Rows are allowed, none is idle, and they hold exactly the pairs that allowed rows hold."""
    factors = {f"f{i}": FACTOR_VALUES[:size] for i, size in enumerate(sizes)}

    def allowed(row: tuple[str, ...]) -> bool:
        return hash((seed, *map(FACTOR_VALUES.index, row))) % 3 > 0

    everything = [row for row in itertools.product(*factors.values()) if allowed(row)]
    rows = pairwise(factors, allowed)
    assert rows == pairwise(factors, allowed)
    assert set(rows) <= set(everything) and len(rows) == len(set(rows))
    assert set().union(*map(pairs, rows)) == set().union(*map(pairs, everything))
    for index, row in enumerate(rows):
        assert pairs(row) - set().union(*map(pairs, rows[:index])), "this row adds nothing"


def config_of(combo: Combo) -> Any:
    model = MODELS[combo.model]
    text = SimpleNamespace(moe_intermediate_size=model.expert_width, linear_num_key_heads=model.key_heads)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_moe=bool(model.expert_width),
            is_hybrid=bool(model.key_heads),
            hf_text_config=text,
            model_arch_config=SimpleNamespace(quantization_config=None),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            prefill_context_parallel_size=combo.world,
            data_parallel_size=1,
            enable_expert_parallel=combo.options.get("enable_expert_parallel", False),
        ),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def test_the_configuration_refuses_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in itertools.product(MODELS, WORLDS, CASES[:1], *list(FACTORS.values())[3:]):
        combo = Combo(*row)
        if pcp_combos.makes_sense(combo):
            for name in ("ATOM_PCP_GDN", "ATOM_PCP_ATTENTION", "ATOM_PCP_MOE"):
                monkeypatch.setenv(name, combo.env.get(name, ""))
            config = config_of(combo)
            message = "\n".join(f"  - {line}" for line in (*unserved_experts(config), *unserved_heads(config)))
            assert pcp_matrix.judge_refusal(combo, message) == ""


def test_wrong_refusals_are_different() -> None:
    served = Combo("qwen3_next", "2", CASES[0], "relay", "zigzag", "shard")
    refused = Combo("qwen3_next", "8", CASES[0], "relay", "zigzag", "shard")
    assert "refused: no reason" in pcp_matrix.judge_refusal(served, "no reason")
    assert "accepted, and should be refused" in pcp_matrix.judge_refusal(refused, "")
    assert "does not say ATOM_PCP_MOE=shard" in pcp_matrix.judge_refusal(refused, "another reason")


def test_a_refusal_is_shown_by_its_reasons() -> None:
    message = "the launch is stopped:\n  - --size 8 cannot be served:\n    - one reason\n    - another"
    assert pcp_matrix.reason(message) == "one reason; another"
    assert pcp_matrix.reason("in other words") == "in other words"


def sample(tokens: list[int]) -> dict[str, Any]:
    return {"tokens": tokens, "finish": "length", "logprobs": [{"1": -0.5, "2": -1.5, "3": -2.5} for _ in tokens]}


def made_up_answer() -> dict[str, Any]:
    return {"samples": [sample([4, 5, 6]), sample([4, 7])], "prompt_logprobs": [None, {"1": -1.0}], "cached": 32}


SPLIT = {"step": "split", "gdn": "relay", "attention": "zigzag", "experts": "shard"}
COMBO = Combo("qwen3_next", "2", "prefix caching", "relay", "zigzag", "shard")
SENT = [[{"prompt": [1, 2]}, {"prompt": [3]}]]


def made_up_result() -> dict[str, Any]:
    metrics = [
        {"name": "vllm:atom_pcp_steps", "labels": SPLIT, "value": 2.0},
        {"name": "vllm:atom_pcp_steps", "labels": {**SPLIT, "step": "replicated", "gdn": NONE}, "value": 9.0},
    ]
    return {
        "waves": [[made_up_answer(), None]],
        "preemptions": 1,
        "free_before": 10,
        "free_after": 10,
        "metrics": copy.deepcopy(metrics),
    }


#: What is found -> the place of the second rank's result, and what stands there instead.
CHANGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "rank 1, wave 0, request 0 (prompt of 2 tokens): sample 1: token 1 is 8, not 7": (
        ("waves", 0, 0, "samples", 1, "tokens", 1),
        8,
    ),
    "sample 0: token 2 is None, not 6": (("waves", 0, 0, "samples", 0, "tokens"), [4, 5]),
    "1 samples, not 2": (("waves", 0, 0, "samples"), [sample([4, 5, 6])]),
    "finished by stop, not length": (("waves", 0, 0, "samples", 0, "finish"), "stop"),
    "position 1: log-probability of token 2 is off by 0.25": (
        ("waves", 0, 0, "samples", 0, "logprobs", 1, "2"),
        -1.25,
    ),
    "log-probabilities of 0 positions, not 3": (("waves", 0, 0, "samples", 0, "logprobs"), []),
    "has log-probabilities of tokens ['7', '8', '9']": (
        ("waves", 0, 0, "samples", 0, "logprobs", 0),
        {"7": -0.5, "8": -1.5, "9": -2.5},
    ),
    "prompt: position 1: log-probability of token 1": (("waves", 0, 0, "prompt_logprobs", 1, "1"), -2.0),
    "prompt: position 1 has no log-probabilities": (("waves", 0, 0, "prompt_logprobs", 1), None),
    "0 tokens from the prefix cache, not 32": (("waves", 0, 0, "cached"), 0),
    "request 0 (prompt of 2 tokens): aborted": (("waves", 0, 0), None),
    "request 1 (prompt of 1 tokens): finished": (("waves", 0, 1), made_up_answer()),
    "preemptions: 2, not 1": (("preemptions",), 2),
    "free blocks: 10 before, 9 after": (("free_after",), 9),
}


@pytest.mark.parametrize("found", CHANGES)
def test_a_difference_is_found(found: str) -> None:
    place, value = CHANGES[found]
    ranks = [made_up_result(), made_up_result()]
    changed: Any = ranks[1]
    for key in place[:-1]:
        changed = changed[key]
    changed[place[-1]] = value
    assert found in first_difference(SENT, made_up_result(), ranks, close=1e-3)


def test_rounding_is_no_difference() -> None:
    other = made_up_result()
    other["waves"][0][0]["samples"][0]["logprobs"][0] = {"1": -0.5004, "2": -1.5, "4": -2.5}
    assert first_difference(SENT, made_up_result(), [made_up_result(), other], close=1e-3) == ""


def test_equal_results_that_show_nothing_are_told() -> None:
    assert unlike_asked(COMBO, made_up_result(), [made_up_result()] * 2) == ""
    missed = made_up_result()
    missed["waves"][0][0]["cached"] = 0
    assert "prefix cache" in unlike_asked(COMBO, missed, [made_up_result()] * 2)
    crowded = Combo("qwen3_next", "2", "preemption", "relay", "zigzag", "shard")
    assert "preempted" in unlike_asked(crowded, {**made_up_result(), "preemptions": 0}, [made_up_result()] * 2)
    whole = made_up_result()
    del whole["metrics"][0]
    assert unlike_asked(COMBO, made_up_result(), [made_up_result(), whole]) == "rank 1 split no step"
    for name, value in (("gdn", "redundant"), ("attention", "contiguous"), ("experts", "replicate")):
        other = made_up_result()
        other["metrics"][0]["labels"][name] = value
        assert value in unlike_asked(COMBO, made_up_result(), [made_up_result(), other])


def test_an_engine_that_fails_costs_only_itself(tmp_path: Path) -> None:
    """Two ranks run four engines; the second fails on one rank, the fourth fails before anything is written."""
    started: list[list[str]] = []

    def start(folder: Path, engines: dict[str, Any]) -> dict[str, Any]:
        started.append(list(engines))
        for rank in range(2):
            (folder / f"plan{rank}.json").write_text("[]")
        if "second" in engines:
            (folder / "result0.json").write_text(json.dumps(["first of 0", "second of 0"]))
            (folder / "result1.json").write_text(json.dumps(["first of 1"]))
            raise AssertionError("exit codes [None, 1]\n[rank1]: [rank1]:   ValueError: no such thing\nend of log")
        if list(engines) == ["third", "fourth"]:
            (folder / "result0.json").write_text(json.dumps(["third of 0"]))
            (folder / "result1.json").write_text(json.dumps(["third of 1"]))
        raise AssertionError("exit codes [None, None]")

    said: list[str] = []
    engines = dict.fromkeys(("first", "second", "third", "fourth"), {})
    outcomes = engine_runs.run_all(tmp_path, "two", start, engines, said.append)
    assert len(said) == 2 and "second failed: ValueError: no such thing" in said[0]
    assert started == [["first", "second", "third", "fourth"], ["third", "fourth"]]
    assert list(outcomes["first"]) == ["first of 0", "first of 1"]
    assert list(outcomes["third"]) == ["third of 0", "third of 1"]
    assert str(outcomes["second"]).startswith("ValueError: no such thing")
    assert str(outcomes["fourth"]).startswith("exit codes [None, None]")


def test_the_table_counts(capsys: pytest.CaptureFixture[str]) -> None:
    table = pcp_matrix.Table()
    table.add(COMBO, "equal")
    table.add(COMBO, "different", "token 3")
    table.add(COMBO, "refused", "heads")
    table.foot()
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].endswith("DIFFERENT: token 3")
    assert shown[-1] == "pcp-matrix: 1 equal, 1 refused, 1 different"
