"""The ATOM decoders in real SGLang engines: the oracle's tokens, in every layout, by our classes, in all layers.

`layer_probe` writes down each step of a decoder, in every scheduler: what this shows of idle ranks are the rows that
really ran. Each engine answers many assertions, because starting one is what costs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engines import Engine, Outcome, Wave, engine, launch, mixed, prompt, request
from tests.sglang.environment import HERE, environment, gpus

DP2: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
TP2: dict[str, Any] = {"tp_size": 2}
SHELLS = "atom_patches.sglang.adapters.classes."
#: A layout's checkpoint, options, the class that SGLang builds, and whether ranks have requests of their own.
LAYOUTS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "dense": ("qwen3_5_text", {} if gpus() == 1 else {"pp_size": 2}, "AtomQwen3_5ForCausalLM", False),
    "next tp2": ("qwen3_next", TP2, "AtomQwen3NextForCausalLM", False),
    "vision dp2": ("qwen3_5", DP2, "AtomQwen3_5ForConditionalGeneration", True),
    "moe dp2 ep2": ("qwen3_5_moe", {**DP2, "ep_size": 2}, "AtomQwen3_5MoeForConditionalGeneration", True),
}
#: Recurrent and attention layers of the tests' checkpoints, whole and in two pipeline stages.
WHOLE, STAGES = [(3, 1)], [(2, 0), (1, 1)]
needs_ranks = pytest.mark.skipif(gpus() == 1, reason="two ranks need two GPUs, and torch finds one")
KEYS = [pytest.param(key, marks=needs_ranks if "2" in key else ()) for key in LAYOUTS]
SPREAD = [pytest.param(key, marks=needs_ranks) for key in LAYOUTS if LAYOUTS[key][3]]


def waves(spread: bool) -> list[Wave]:
    """Many at once, one alone, two that overlap, and two that begin like another; on named ranks where ranks are."""
    first, last = (0, 1) if spread else (None, None)
    alone = [request(prompt(7), new=6, rank=last)]
    overlap = [request(prompt(40, 2), new=16, rank=first), request(prompt(33), at=0.4, rank=last)]
    shared = [request(prompt(150) + prompt(n), rank=first) for n in (4, 21)]
    return [mixed(), alone, overlap, shared]


def planned(key: str, folder: Path) -> Engine:
    name, layout, _, spread = LAYOUTS[key]
    probe = folder / "probe" / key.replace(" ", "_")
    probe.mkdir(parents=True)
    env = {"SGLANG_PLUGINS": "atom,layer_probe", "ATOM_MODELS": "1", "LAYER_PROBE": str(probe)}
    env["PYTHONPATH"] = environment(HERE / "layer_probe")["PYTHONPATH"]
    graphs = {"cuda_graph_backend_prefill": "disabled"} if gpus() else {}
    return engine(name, waves(spread), env=env, chunked_prefill_size=128, **graphs, **layout)


@dataclass(frozen=True)
class Probed:
    """An engine's answers, and its decoders' steps by process."""

    outcome: Outcome
    steps: list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Probed]:
    folder = tmp_path_factory.mktemp("atom_models")
    keys = [key for key in LAYOUTS if gpus() != 1 or "2" not in key]
    outcomes = launch(folder, {key: planned(key, folder) for key in keys})
    return {key: Probed(outcome, _read(folder / "probe" / key.replace(" ", "_"))) for key, outcome in outcomes.items()}


def _read(folder: Path) -> list[list[dict[str, Any]]]:
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))]


@pytest.mark.parametrize("key", KEYS)
def test_every_answer_is_the_oracle_s(engines: dict[str, Probed], key: str) -> None:
    assert engines[key].outcome.check() == 13


@pytest.mark.parametrize("key", KEYS)
def test_our_class_ran_all_of_its_layers_in_every_step(engines: dict[str, Probed], key: str) -> None:
    probed = engines[key]
    assert {rank.model for rank in probed.outcome.ranks} == {SHELLS + LAYOUTS[key][2]}
    assert len(probed.steps) == len(probed.outcome.ranks)
    ran = [{(step.get("recurrent", 0), step.get("attention", 0)) for step in steps} for steps in probed.steps]
    assert all(len(layers) == 1 for layers in ran), "some step skipped layers"
    whole = WHOLE * len(ran)
    assert sorted(layers.pop() for layers in ran) == sorted(STAGES if "pp_size" in LAYOUTS[key][1] else whole)


@pytest.mark.parametrize("key", SPREAD)
def test_an_idle_rank_runs_one_row_that_is_no_request_s(engines: dict[str, Probed], key: str) -> None:
    for steps in engines[key].steps:
        idle = [step for step in steps if step["logical"] == 0]
        assert idle
        for step in idle:
            assert step["physical"][step["rank"]] == 1
            assert (step["rows"], step["sequences"]) == (1, 0)


@pytest.mark.parametrize("key", SPREAD)
def test_ranks_plan_every_step_alike(engines: dict[str, Probed], key: str) -> None:
    """Equal lengths, since each rank enters a decoder whenever the other does."""
    zero, one = engines[key].steps
    assert len(zero) == len(one)
    for a, b in zip(zero, one, strict=True):
        assert a["physical"] == b["physical"]
        assert a["uniform_decode"] == b["uniform_decode"]
        busy = {step["mode"] for step in (a, b)} - {"idle"}
        assert a["uniform_decode"] == (busy == {"decode"})


@pytest.mark.parametrize("key", SPREAD)
def test_modes_meet_that_deadlocked_decoders_before(engines: dict[str, Probed], key: str) -> None:
    zero, one = engines[key].steps
    met = {frozenset((a["mode"], b["mode"])) for a, b in zip(zero, one, strict=True)}
    assert {frozenset(("idle", "extend")), frozenset(("idle", "decode")), frozenset(("extend", "decode"))} <= met


def test_prompts_are_cut_and_prefixes_are_shared(engines: dict[str, Probed]) -> None:
    outcome = engines["next tp2" if gpus() != 1 else "dense"].outcome
    assert max(step["rows"] or 0 for rank in outcome.ranks for step in rank.steps) <= 128
    assert gpus() == 1 or any(answer["cached"] for answer in outcome.answers[-1])
